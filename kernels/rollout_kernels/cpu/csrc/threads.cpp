#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

constexpr unsigned kClosed = 1u << 31;
constexpr auto kSpin = std::chrono::microseconds(60);  // longer than the gap between two operations of a step

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

struct Team {
  std::mutex callers;  // one loop at a time; a second caller works alone
  std::mutex sleep_mutex;
  std::condition_variable wake;
  std::atomic<unsigned long> generation{0};
  std::atomic<int> sleepers{0};
  std::atomic<unsigned> state{kClosed};  // threads inside the loop, or closed to newcomers
  std::atomic<long> limit{1};            // threads that may take part
  long num_started = 1;                  // threads of the team, the caller included
  void (*body)(void*) = nullptr;
  void* context = nullptr;

  bool enter() {
    unsigned inside = state.load(std::memory_order_acquire);
    while (!(inside & kClosed))
      if (state.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  void wait_for_change(unsigned long seen) {
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (generation.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 32; i++) pause_cpu();
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock<std::mutex> lock(sleep_mutex);
      sleepers.fetch_add(1);
      wake.wait(lock, [&] { return generation.load() != seen; });
      sleepers.fetch_sub(1);
      return;
    }
  }

  void work(long index) {
    unsigned long seen = 0;
    for (;;) {
      wait_for_change(seen);
      seen = generation.load(std::memory_order_acquire);
      if (index < limit.load(std::memory_order_relaxed) && enter()) {
        body(context);
        state.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  void run(void (*new_body)(void*), void* new_context) {
    for (; num_started < limit.load(); num_started++)
      std::thread([this, index = num_started] { work(index); }).detach();
    body = new_body;
    context = new_context;
    state.store(0, std::memory_order_release);
    generation.fetch_add(1);
    if (sleepers.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_mutex);
      wake.notify_all();
    }
    new_body(new_context);
    state.fetch_or(kClosed, std::memory_order_acq_rel);
    for (long spins = 0; state.load(std::memory_order_acquire) != kClosed; spins++)
      spins < 2000 ? pause_cpu() : (void)sched_yield();
  }
};

// Never destroyed: its threads may still wait when the process ends. After a fork the child, in which only the calling
// thread lives, begins with a new one.
Team* team = nullptr;

Team* current_team() {
  static const bool created = [] {
    team = new Team;
    pthread_atfork(nullptr, nullptr, [] {
      const long limit = team->limit.load();
      team = new Team;
      team->limit.store(limit);
    });
    return true;
  }();
  (void)created;
  return team;
}

}  // namespace

long num_threads() { return current_team()->limit.load(std::memory_order_relaxed); }

void run_on_team(void (*body)(void*), void* context) {
  Team* t = current_team();
  std::unique_lock<std::mutex> lock(t->callers, std::try_to_lock);
  if (lock.owns_lock())
    t->run(body, context);
  else
    body(context);
}

extern "C" void rk_set_num_threads(long count) { current_team()->limit.store(count < 1 ? 1 : count); }
