// Recorded programs: the calls of one step, with their arguments, made one after another without Python between them.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels.h"

namespace {

typedef long (*Step)(const uint64_t* arguments);

template <typename T>
T unpack(uint64_t word) {
  static_assert(sizeof(T) <= sizeof word, "an argument fills at most one word");
  T value;
  memcpy(&value, &word, sizeof value);
  return value;
}

// Calls `Function` with the words of an argument list, each read as the type of its parameter.
template <auto Function>
struct Unpacked;

template <typename Result, typename... Arguments, Result (*Function)(Arguments...)>
struct Unpacked<Function> {
  static constexpr long count = sizeof...(Arguments);

  template <size_t... I>
  static long call_with(const uint64_t* words, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<Result>) {
      Function(unpack<Arguments>(words[I])...);
      return 0;
    } else {
      return Function(unpack<Arguments>(words[I])...);
    }
  }
  static long call(const uint64_t* words) { return call_with(words, std::index_sequence_for<Arguments...>{}); }
};

struct Entry {
  const char* name;
  Step step;
  long num_arguments;
};

#define RK_ENTRY(name) {#name, Unpacked<rk_##name>::call, Unpacked<rk_##name>::count}

const Entry kEntries[] = {
    RK_ENTRY(embedding), RK_ENTRY(linear),       RK_ENTRY(linear_rotary), RK_ENTRY(linear_silu_and_mul),
    RK_ENTRY(rms_norm),  RK_ENTRY(linear_int8),  RK_ENTRY(rotary),        RK_ENTRY(silu_and_mul),
    RK_ENTRY(write_kv),  RK_ENTRY(paged_attention),
    RK_ENTRY(lora_shrink), RK_ENTRY(lora_expand),
};

}  // namespace

// The function to put into a program for a kernel, and how many arguments it takes; null where it cannot be recorded.
extern "C" const void* rk_program_step(const char* name, long* num_arguments) {
  for (const Entry& entry : kEntries)
    if (strcmp(entry.name, name) == 0) {
      *num_arguments = entry.num_arguments;
      return (const void*)entry.step;
    }
  return nullptr;
}

// Makes `count` calls in order; call i has the arguments from `words[offsets[i]]` on. Stops at the first that reports a
// bad argument and returns 1 + its index, otherwise 0. Adds each call's time to `nanoseconds[i]` where that is given.
extern "C" long rk_replay(const void* const* steps, const uint64_t* words, const long* offsets, long count,
                          int64_t* nanoseconds) {
  typedef std::chrono::steady_clock clock;
  clock::time_point begin = nanoseconds ? clock::now() : clock::time_point();
  for (long i = 0; i < count; i++) {
    if (((Step)steps[i])(words + offsets[i])) return i + 1;
    if (nanoseconds) {
      const clock::time_point end = clock::now();
      nanoseconds[i] += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
      begin = end;
    }
  }
  return 0;
}
