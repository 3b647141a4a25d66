// The tile registers of Intel's AMX, where compiler, machine and operating system have them ("Intel 64 and IA-32
// Architectures Software Developer's Manual", volume 1, chapter 18).
//
// TDPBF16PS adds up pairs of bfloat16 along K, one after another, in float32: an output does not depend on those beside
// it in the tile. Numbers below 2^-126 count as zero, as with the vectors' VDPBF16PS.
#pragma once
#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define RK_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Whether Linux lets this process use the tiles; to ask for it once is enough for all threads.
static inline bool has_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

struct TileShape {
  uint8_t rows;
  uint16_t row_bytes;
};

// The tile registers of a thread, while this lives.
class TileRegisters {
 public:
  explicit TileRegisters(const TileShape (&shapes)[8]) {
    if (!has_tiles()) return;
    alignas(64) uint8_t config[64] = {1};
    for (int t = 0; t < 8; t++) {
      memcpy(config + 16 + 2 * t, &shapes[t].row_bytes, sizeof(uint16_t));
      config[48 + t] = shapes[t].rows;
    }
    asm volatile("" ::: "memory");  // the intrinsic does not say that it reads
    _tile_loadconfig(config);
  }
  ~TileRegisters() {
    if (has_tiles()) _tile_release();
  }
  TileRegisters(const TileRegisters&) = delete;
};
#endif
