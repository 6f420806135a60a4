#include "pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <map>

namespace draftsmith {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int SPINS_BEFORE_YIELD = 4000;           // tens of microseconds: longer than a phase's uneven end
constexpr auto AWAKE = std::chrono::microseconds(200);  // between two steps; then a thread sleeps

void pin_to(int place) {
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    int seen = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed) || seen++ != place) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
#else
    (void)place;
#endif
}

}  // namespace

Pool::Pool(int threads, bool pin)
    : num_threads_(threads), pin_(pin), claimed_(static_cast<std::size_t>(threads)) {
    start();
}

void Pool::forget_claims() {
    for (Claimed& claimed : claimed_) claimed.next.store(0, std::memory_order_relaxed);
}

void Pool::start() {
    owner_ = getpid();
    for (int thread = 1; thread < num_threads_; ++thread) {
        workers_.emplace_back([this, thread] { serve(thread); });
    }
}

Pool::~Pool() {
    if (owner_ != getpid()) {
        // A forked child has the objects but not the threads.
        for (std::thread& worker : workers_) worker.detach();
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(sleep_);
        is_closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& work) {
    const std::lock_guard<std::mutex> one_caller(callers_);
    forget_claims();
    if (num_threads_ == 1) {
        work(0);
        return;
    }
    work_ = &work;
    running_.store(num_threads_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
        const std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    work(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
        if (spins < SPINS_BEFORE_YIELD) relax();
        else sched_yield();
    }
}

void Pool::barrier() {
    if (num_threads_ == 1) {
        forget_claims();
        return;
    }
    const std::uint32_t phase = phase_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
        waiting_.store(0, std::memory_order_relaxed);
        forget_claims();
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
        if (spins < SPINS_BEFORE_YIELD) relax();
        else sched_yield();
    }
}

void Pool::serve(int thread) {
    if (pin_) pin_to(thread);
    std::uint32_t done = 0;
    for (;;) {
        const auto since = std::chrono::steady_clock::now();
        int spins = 0;
        while (round_.load(std::memory_order_acquire) == done && !is_closing_) {
            relax();
            if (++spins % 64 != 0 || std::chrono::steady_clock::now() - since < AWAKE) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return round_.load(std::memory_order_seq_cst) != done || is_closing_; });
            num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (is_closing_) return;
        done = round_.load(std::memory_order_acquire);
        (*work_)(thread);
        running_.fetch_sub(1, std::memory_order_release);
    }
}

std::shared_ptr<Pool> shared_pool(int threads, bool pin) {
    static std::mutex mutex;
    static std::map<std::pair<int, bool>, std::pair<long, std::weak_ptr<Pool>>> pools;
    const std::lock_guard<std::mutex> lock(mutex);
    auto& [owner, known] = pools[{threads, pin}];
    std::shared_ptr<Pool> pool = known.lock();
    if (pool == nullptr || owner != getpid()) {
        pool = std::make_shared<Pool>(threads, pin);
        known = pool;
        owner = getpid();
    }
    return pool;
}

}  // namespace draftsmith
