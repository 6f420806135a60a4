// Threads that work through one step together: every thread runs the same function and meets the others at
// barriers; shares of a phase are claimed one after the other, so a thread that is held up holds up nobody.
// Used by the decoder. Invariants: which thread does a share never changes what it computes; a forked process starts
// threads of its own at its first run and leaves alone what its parent's threads hold.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace draftsmith {

class Pool {
  public:
    // `threads`: how many work, the caller among them. `pin`: keep each on a processor of its own.
    Pool(int threads, bool pin);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return num_threads_; }

    // Runs work(thread) on all threads and returns when all are done. One caller at a time; others wait.
    void run(const std::function<void(int)>& work);

    // Called by every thread inside `run`: nobody goes on before all have arrived. Claims start again at 0.
    void barrier();

    // Calls share(i) for every i below `total`, on one thread or another, `size` neighbours at a time. Called by every
    // thread between two barriers. Each begins with a stretch of its own, which keeps what it writes in its cache
    // from one phase to the next, and then helps the others.
    template <class Share>
    void each(int thread, int total, int size, Share share) {
        for (int helped = 0; helped < num_threads_; ++helped) {
            const int owner = (thread + helped) % num_threads_;
            const int start = stretch(owner, total), end = stretch(owner + 1, total);
            for (;;) {
                const int first = start + claimed_[static_cast<std::size_t>(owner)].next.fetch_add(size, std::memory_order_relaxed);
                if (first >= end) break;
                const int last = first + size < end ? first + size : end;
                for (int i = first; i < last; ++i) share(i);
            }
        }
    }

  private:
    // What a process cannot take over from its parent: threads that are gone, locks that they may hold, a condition
    // that counts them among those who wait.
    struct Team {
        std::mutex callers, sleep;
        std::condition_variable wake;
        std::vector<std::thread> workers;
    };
    struct alignas(64) Claimed {
        std::atomic<int> next{0};
    };

    void serve(int thread);
    void start();
    void renew();
    void stop();
    // Returns once is_done() is true.
    template <class Done>
    void wait(Done is_done);
    void forget_claims();
    int stretch(int thread, int total) const {
        return static_cast<int>(static_cast<std::int64_t>(thread) * total / num_threads_);
    }

    const int num_threads_;
    const bool pin_;
    std::atomic<int> generation_{0};  // forks that led to the process of the team
    std::unique_ptr<Team> team_;
    const std::function<void(int)>* work_ = nullptr;
    alignas(64) std::atomic<std::uint32_t> round_{0};
    alignas(64) std::atomic<int> running_{0};
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<std::uint32_t> phase_{0};
    alignas(64) std::atomic<int> patience_;  // spins of a waiting thread before it yields
    std::vector<Claimed> claimed_;
    std::atomic<bool> is_closing_{false};
    std::atomic<int> num_asleep_{0};
};

// The pool of this process with so many threads: models that take turns share it. Throws std::runtime_error when
// the system does not start that many.
std::shared_ptr<Pool> shared_pool(int threads, bool pin);

}  // namespace draftsmith
