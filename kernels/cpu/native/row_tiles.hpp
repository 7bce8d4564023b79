// How the rows of a matrix product are divided into tiles.
#pragma once

#include "vec.hpp"

namespace FISSILE_ISA {

struct RowTile {
  int64_t first;
  int64_t rows;
};

// Tile `tile` of `rows` rows, divided evenly into tiles of at most `most` rows.
FISSILE_INLINE RowTile row_tile(int64_t rows, int64_t most, int64_t tile) {
  const int64_t all = parts(rows, most), share = rows / all, more = rows % all;
  return {tile * share + at_most(tile, more), share + (tile < more)};
}

}  // namespace FISSILE_ISA
