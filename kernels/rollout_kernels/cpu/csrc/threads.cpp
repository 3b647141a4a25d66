#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
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

Ranges::Ranges(long count, long threads) : size_(std::clamp(std::min(count, threads), 1L, kMost)) {
  for (long i = 0; i < size_; i++) {
    const uint64_t begin = count * i / size_, end = count * (i + 1) / size_;
    rests_[i].units.store(begin << 32 | end, std::memory_order_relaxed);
  }
}

// Takes units from the front of a range; false where it is empty.
bool Ranges::cut(Rest& rest, long most, long* begin, long* end) {
  uint64_t units = rest.units.load(std::memory_order_relaxed);
  do {
    const long last = (long)(uint32_t)units;
    *begin = (long)(units >> 32);
    *end = std::min(*begin + most, last);
    if (*begin >= last) return false;
  } while (!rest.units.compare_exchange_weak(units, (uint64_t)*end << 32 | (uint32_t)units, std::memory_order_relaxed));
  return true;
}

// The range with most units left, or null where all are empty.
Ranges::Rest* Ranges::largest() {
  Rest* found = nullptr;
  long most = 0;
  for (long i = 0; i < size_; i++) {
    const uint64_t units = rests_[i].units.load(std::memory_order_relaxed);
    const long left = (long)(uint32_t)units - (long)(units >> 32);
    if (left > most) most = left, found = &rests_[i];
  }
  return found;
}

bool Ranges::take(long place, long most, long* begin, long* end) {
  if (place < size_ && cut(rests_[place], most, begin, end)) return true;
  for (Rest* other; (other = largest());) {
    if (place >= size_) {
      if (cut(*other, most, begin, end)) return true;
      continue;
    }
    uint64_t units = other->units.load(std::memory_order_relaxed);
    const uint64_t first = units >> 32, last = (uint32_t)units, middle = first + (last - first) / 2;
    if (first >= last) continue;
    if (!other->units.compare_exchange_strong(units, first << 32 | middle, std::memory_order_relaxed)) continue;
    // Nobody else writes to an empty range of this thread's own.
    rests_[place].units.store(middle << 32 | last, std::memory_order_relaxed);
    if (cut(rests_[place], most, begin, end)) return true;
  }
  return false;
}

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
