// How the rows of a product are shared out among its tiles.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

struct RowTile {
  int64_t first;
  int64_t rows;
};

// Evenly, of up to `most` rows each.
FISSILE_INLINE RowTile row_tile(int64_t rows, int64_t most, int64_t tile) {
  const int64_t all = parts(rows, most), share = rows / all, more = rows % all;
  return {tile * share + at_most(tile, more), share + (tile < more)};
}

}  // namespace FISSILE_ISA
