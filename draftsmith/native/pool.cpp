#include "pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace draftsmith {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins before a waiting thread lets others have its processor: at most tens of microseconds, longer than a phase's
// uneven end; fewer where that is in vain, because somebody else has the processor of the thread waited for.
constexpr int MOST_SPINS = 4000;
constexpr int LEAST_SPINS = 60;
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

// Counts the forks that led to this process.
std::atomic<int> num_forks{0};
void count_fork() { num_forks.fetch_add(1); }

}  // namespace

Pool::Pool(int threads, bool pin)
    : num_threads_(threads), pin_(pin), patience_(MOST_SPINS), claimed_(static_cast<std::size_t>(threads)) {
    static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
    (void)registered;
    start();
}

void Pool::forget_claims() {
    for (Claimed& claimed : claimed_) claimed.next.store(0, std::memory_order_relaxed);
}

void Pool::start() {
    team_ = std::make_unique<Team>();
    is_closing_ = false;
    round_ = 0;
    running_ = waiting_ = num_asleep_ = 0;
    try {
        for (int thread = 1; thread < num_threads_; ++thread) {
            team_->workers.emplace_back([this, thread] { serve(thread); });
        }
    } catch (const std::system_error& error) {
        stop();
        throw std::runtime_error("cannot start " + std::to_string(num_threads_) + " threads: " + error.what());
    }
    generation_.store(num_forks.load(), std::memory_order_release);
}

void Pool::renew() {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (generation_.load() == num_forks.load()) return;
    (void)team_.release();
    start();
}

void Pool::stop() {
    {
        const std::lock_guard<std::mutex> lock(team_->sleep);
        is_closing_ = true;
    }
    team_->wake.notify_all();
    for (std::thread& worker : team_->workers) worker.join();
    team_->workers.clear();
}

Pool::~Pool() {
    if (generation_ == num_forks.load()) stop();
    else (void)team_.release();
}

void Pool::run(const std::function<void(int)>& work) {
    if (generation_.load(std::memory_order_acquire) != num_forks.load(std::memory_order_relaxed)) renew();
    const std::lock_guard<std::mutex> one_caller(team_->callers);
    forget_claims();
    if (num_threads_ == 1) {
        work(0);
        return;
    }
    work_ = &work;
    running_.store(num_threads_ - 1, std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
        const std::lock_guard<std::mutex> lock(team_->sleep);
        team_->wake.notify_all();
    }
    work(0);
    wait([&] { return running_.load(std::memory_order_acquire) == 0; });
}

template <class Done>
void Pool::wait(Done is_done) {
    const int patience = patience_.load(std::memory_order_relaxed);
    for (int spins = 0; spins < patience; ++spins) {
        if (is_done()) {
            if (patience < MOST_SPINS) patience_.store(std::min(2 * patience, MOST_SPINS), std::memory_order_relaxed);
            return;
        }
        relax();
    }
    patience_.store(std::max(patience / 2, LEAST_SPINS), std::memory_order_relaxed);
    while (!is_done()) sched_yield();
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
    wait([&] { return phase_.load(std::memory_order_acquire) != phase; });
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
            std::unique_lock<std::mutex> lock(team_->sleep);
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            team_->wake.wait(lock, [&] { return round_.load(std::memory_order_seq_cst) != done || is_closing_; });
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
    static std::map<std::pair<int, bool>, std::weak_ptr<Pool>> pools;
    const std::lock_guard<std::mutex> lock(mutex);
    std::weak_ptr<Pool>& known = pools[{threads, pin}];
    std::shared_ptr<Pool> pool = known.lock();
    if (pool == nullptr) known = pool = std::make_shared<Pool>(threads, pin);
    return pool;
}

}  // namespace draftsmith
