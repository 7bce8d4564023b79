// Matrix products of bfloat16 by AMX. Each number of y is one element of a tile, to which TDPBF16PS adds the sum of 32
// values of k at a time, in order, from zero to the end. The bits do not depend on which rows and columns are computed
// together, or on whether sums are stored in between (as float32, exactly). A block of K_BLOCK int8 weights is
// converted to bfloat16, which is exact. Its sum from zero is multiplied by the scale of its column and added to the
// other blocks' sums, in order. Products of float32 use the base table's kernels.
//
// x is read in place if tiles of its rows load fast (Shape::in_place). Otherwise it is copied to tiles [rows / 16][k /
// 32][16][32], with zeros after the last row and the last k. If x has fewer than 16 rows, its tiles have only as many
// rows. A panel of packed weights already is a column of tiles.
#include "bf16_rows.hpp"
#include "few_rows_amx.hpp"
#include "own_linear.hpp"
#include "row_tiles.hpp"
#include "tiles.hpp"
#include "write_row.hpp"

namespace FISSILE_ISA {
namespace {

using fissile::K_BLOCK;
using fissile::PANEL;
using fissile::Linear;

// Values of k that one instruction adds.
constexpr int64_t STEP = 2 * TILE_PAIRS;
// Numbers of a tile of weights, and of a tile of sums.
constexpr int64_t WEIGHT_TILE = STEP * PANEL;
constexpr int64_t SUMS_TILE = TILE_ROWS * PANEL;
// Most row tiles and most panels of a task. Fewer panels if weights are read only once, so that there are more tasks.
constexpr int64_t TASK_ROW_TILES = 16;
constexpr int64_t TASK_PANELS = 8;
constexpr int64_t TASK_PANELS_OF_FEW = 4;
// Steps after which the next row tiles are computed, so that the task's panels and rows of x stay in L2. With fewer
// steps the panels would stay in L1, but storing and reloading sums costs more than that saves.
constexpr int64_t STEPS_AT_ONCE = 64;
// Steps of a block of int8 weights.
constexpr int64_t BLOCK_STEPS = K_BLOCK / STEP;
// Bytes between a prefetch of a panel and its use.
constexpr int64_t PREFETCH = 2048;
constexpr int64_t LINE = 64;
constexpr int64_t TILE_LINES = WEIGHT_TILE * static_cast<int64_t>(sizeof(Bf16)) / LINE;
// Stripes in which a panel is prefetched. With one pass, multiplying takes no longer than loading the weights, and
// memory delivers more stripes sooner.
constexpr int64_t stripes(int64_t passes) { return passes == 1 ? 4 : 2; }
// Steps between two tile stores. TILESTORED takes about 240 ns if none was executed in the last 600 ns, and almost
// nothing otherwise. The steps of one row tile are long, because they wait for memory.
constexpr int64_t awake_steps(int row_tiles) { return row_tiles == 1 ? 1 : 4; }

// True if tiles can be loaded from x in place. Rows an even number of cache lines apart map to few sets of L1, which
// costs time if a tile's rows are loaded again for many panels.
bool stands_well(const Linear& work, int64_t tile_rows) {
  const uint64_t bytes = static_cast<uint64_t>(work.x_stride) * sizeof(Bf16);
  const bool whole_lines = reinterpret_cast<uint64_t>(work.x) % LINE == 0 && bytes % LINE == 0 &&
                           work.weight.inner % STEP == 0;
  return whole_lines && parts(work.rows, tile_rows) * tile_rows <= work.readable_rows &&
         (work.rows <= TILE_ROWS || bytes / LINE % 2 == 1);
}

struct Shape {
  int64_t steps;
  int64_t row_tiles;
  int64_t tile_rows;
  bool in_place;
  // Numbers of x from one row of a tile to the next, from step to step, and from tile to tile.
  int64_t row_size;
  int64_t step_size;
  int64_t tile_size;
  // Number of panels, bytes of a panel, and bytes to the panel that is multiplied with it. For gated work, panels of
  // gates and ups alternate.
  int64_t panels;
  int64_t panel_bytes;
  int64_t apart;
  int64_t task_panels;
  int64_t row_groups;
  int64_t panel_groups;

  explicit Shape(const Linear& work) {
    steps = parts(work.weight.inner, STEP);
    row_tiles = parts(work.rows, TILE_ROWS);
    tile_rows = at_most(TILE_ROWS, work.rows);
    in_place = stands_well(work, tile_rows);
    row_size = in_place ? work.x_stride : STEP;
    step_size = in_place ? STEP : tile_rows * STEP;
    tile_size = in_place ? tile_rows * work.x_stride : steps * step_size;
    panels = parts(work.weight.columns, PANEL);
    panel_bytes = fissile::panel_bytes(work.weight.dtype, work.weight.inner);
    apart = work.gated ? panels / 2 * panel_bytes : panel_bytes;
    task_panels = row_tiles <= 2 ? TASK_PANELS_OF_FEW : TASK_PANELS;
    row_groups = parts(row_tiles, TASK_ROW_TILES);
    panel_groups = parts(panels, task_panels);
  }
};

// Use of the tile registers: 0-3 hold sums, 4 holds rows of x, 6 and 7 hold weights; 5 holds the second row tile, or
// weights if there is none. With three row tiles, 0-5 hold sums, 6 holds rows of x and 7 holds weights.
void shape_tiles(int64_t rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; tile++) {
    shapes.bytes[tile] = TILE_BYTES;
    shapes.rows[tile] = static_cast<uint8_t>(tile <= 4 ? rows : TILE_PAIRS);
  }
  load_tile_shapes(shapes);
}

// Weights to prefetch during a block, one line of each stripe of each panel at a time, because the hardware prefetcher
// works stripe by stripe. Prefetches from `near` on for `near_steps` steps, then from `next` on.
struct Ahead {
  const char* near;
  int64_t near_steps;
  const char* next;
  int64_t panel_bytes;
  // Number of stripes, bytes from stripe to stripe, and bytes to the next line of a stripe.
  int64_t stripes;
  int64_t stripe_bytes;
  int64_t line_bytes;
  // Each stripe has `lines` lines to prefetch in `steps` steps. `due` / `steps` is the fraction of the next line that
  // is due already.
  int64_t lines;
  int64_t steps = 1;
  int64_t due;

  // fetch_near prefetches into L1 what is needed soon; fetch_next prefetches into L2 what the next part needs.
  template <int PANELS>
  __attribute__((always_inline)) void fetch_near() {
    fetch<PANELS, 3>(near);
  }

  template <int PANELS>
  __attribute__((always_inline)) void fetch_next() {
    fetch<PANELS, 2>(next);
  }

 private:
  template <int PANELS, int LOCALITY>
  __attribute__((always_inline)) void fetch(const char*& at) {
    for (due += lines; due >= steps; due -= steps, at += line_bytes)
      for (int64_t stripe = 0; stripe < stripes; stripe++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) __builtin_prefetch(at + stripe * stripe_bytes + p * panel_bytes, 0, LOCALITY);
  }
};

// Finished sums [row tiles][panels][SUMS_TILE] that still have to be written to y. One row is written in each step of
// the next block, while the tiles are busy.
struct Finished {
  const Linear* work;
  const float* sums;
  int64_t tile_stride;
  int64_t row;
  int64_t rows;
  int64_t panel;
  int64_t panels;
  Bf16* y;

  __attribute__((always_inline)) void write_next() {
    if (row == rows) return;
    const float* from = sums + row / TILE_ROWS * tile_stride + row % TILE_ROWS * PANEL;
    if (work->gated) write_gated(from);
    else write_panels(from);
    y += work->y_stride;
    row++;
  }

  __attribute__((always_inline)) void write_panels(const float* from) const {
    for (int64_t p = panel; p < panel + panels; p++, from += SUMS_TILE)
      write_row(*work, from, p * PANEL, y + p * PANEL);
  }

  __attribute__((always_inline)) void write_gated(const float* from) const {
    for (int64_t p = panel; p < panel + panels; p += 2, from += 2 * SUMS_TILE)
      write_gated_row(*work, from, from + SUMS_TILE, p / 2 * PANEL, y + p / 2 * PANEL);
  }

  void write_all() {
    while (row < rows) write_next();
  }
};

// Some row tiles by some panels, over some steps.
struct Block {
  const Bf16* x;
  int64_t x_row_bytes;
  int64_t x_tile_size;
  int64_t x_step_size;
  const Bf16* weights;
  int64_t panel_size;
  int64_t steps;
  // The last step's weights of each panel, padded with zeros, if they do not fill a tile; otherwise null.
  const Bf16* tail;
  // Tiles of sums to continue, or null to start from zero; the tiles to store; and the strides from row tile to row
  // tile.
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  Ahead ahead;
  // Earlier sums, written during this block.
  Finished* before;
  // Memory for the tile stores that keep TILESTORED fast. Null if blocks are so short that their sums are stored often
  // enough.
  float* unused;
};

template <int ROW_TILES, int PANELS>
struct Multiplier {
  static_assert(ROW_TILES == 1 ? PANELS <= 4 : ROW_TILES <= 3 && PANELS <= 2);

  static constexpr int X_TILE = ROW_TILES == 3 ? 6 : 4;

  template <int PANEL_NUMBER>
  static constexpr int weights_tile() {
    return ROW_TILES == 1 ? 5 + PANEL_NUMBER % 3 : 6 + PANEL_NUMBER;
  }

  static constexpr int sums_tile(int row_tile, int panel) { return row_tile * 2 + panel; }

  template <int P = 0>
  FISSILE_INLINE void begin(const Block& block) {
    if constexpr (P < PANELS) {
      begin_one<sums_tile(0, P)>(block.from, P * SUMS_TILE);
      if constexpr (ROW_TILES >= 2) begin_one<sums_tile(1, P)>(block.from, block.from_stride + P * SUMS_TILE);
      if constexpr (ROW_TILES == 3) begin_one<sums_tile(2, P)>(block.from, 2 * block.from_stride + P * SUMS_TILE);
      begin<P + 1>(block);
    }
  }

  template <int TILE>
  FISSILE_INLINE void begin_one(const float* from, int64_t place) {
    if (from) tile_load<TILE>(from + place);
    else tile_zero<TILE>();
  }

  template <int P = 0>
  FISSILE_INLINE void end(const Block& block) {
    if constexpr (P < PANELS) {
      tile_store<sums_tile(0, P)>(block.to + P * SUMS_TILE);
      if constexpr (ROW_TILES >= 2) tile_store<sums_tile(1, P)>(block.to + block.to_stride + P * SUMS_TILE);
      if constexpr (ROW_TILES == 3) tile_store<sums_tile(2, P)>(block.to + 2 * block.to_stride + P * SUMS_TILE);
      end<P + 1>(block);
    }
  }

  template <int P = 0>
  FISSILE_INLINE void multiply_panels(const Bf16* weights, int64_t panel_size) {
    if constexpr (P < PANELS) {
      tile_load<weights_tile<P>()>(weights + P * panel_size);
      tile_multiply<sums_tile(0, P), 4, weights_tile<P>()>();
      if constexpr (ROW_TILES == 2) tile_multiply<sums_tile(1, P), 5, weights_tile<P>()>();
      multiply_panels<P + 1>(weights, panel_size);
    }
  }

  FISSILE_INLINE void step(const Block& block, int64_t step, const Bf16* weights, int64_t panel_size) {
    const Bf16* x = block.x + step * block.x_step_size;
    if constexpr (ROW_TILES == 3) return step_of_three(block, x, weights, panel_size);
    tile_load<4>(x, block.x_row_bytes);
    if constexpr (ROW_TILES == 2) tile_load<5>(x + block.x_tile_size, block.x_row_bytes);
    multiply_panels(weights, panel_size);
  }

  // Six tiles hold sums, so x and weights have one tile each. With two panels, two row tiles are loaded twice.
  FISSILE_INLINE void step_of_three(const Block& block, const Bf16* x, const Bf16* weights, int64_t panel_size) {
    tile_load<7>(weights);
    tile_load<6>(x, block.x_row_bytes);
    tile_multiply<0, 6, 7>();
    tile_load<6>(x + block.x_tile_size, block.x_row_bytes);
    tile_multiply<2, 6, 7>();
    tile_load<6>(x + 2 * block.x_tile_size, block.x_row_bytes);
    tile_multiply<4, 6, 7>();
    if constexpr (PANELS == 2) {
      tile_load<7>(weights + panel_size);
      tile_multiply<5, 6, 7>();
      tile_load<6>(x + block.x_tile_size, block.x_row_bytes);
      tile_multiply<3, 6, 7>();
      tile_load<6>(x, block.x_row_bytes);
      tile_multiply<1, 6, 7>();
    }
  }

  FISSILE_INLINE void whole_step(const Block& block, int64_t s) {
    block.before->write_next();
    step(block, s, block.weights + s * WEIGHT_TILE, block.panel_size);
    if (block.unused && s % awake_steps(ROW_TILES) == 0) tile_store<X_TILE>(block.unused);
  }

  __attribute__((noinline)) static void run(const Block& block) {
    const int64_t whole = block.steps - (block.tail ? 1 : 0);
    Ahead ahead = block.ahead;
    const int64_t near_steps = at_most(ahead.near_steps, whole);
    int64_t s = 0;
    begin(block);
    // Prefetches after the step's own loads, which would otherwise wait for the line buffers that the prefetches
    // occupy.
    for (; s < near_steps; s++) {
      whole_step(block, s);
      ahead.template fetch_near<PANELS>();
    }
    for (; s < whole; s++) {
      ahead.template fetch_next<PANELS>();
      whole_step(block, s);
    }
    if (block.tail) step(block, whole, block.tail, WEIGHT_TILE);
    end(block);
  }
};

void multiply(const Block& block, int64_t row_tiles, int64_t panels) {
  if (row_tiles == 3) return panels == 2 ? Multiplier<3, 2>::run(block) : Multiplier<3, 1>::run(block);
  if (row_tiles == 2) return panels == 2 ? Multiplier<2, 2>::run(block) : Multiplier<2, 1>::run(block);
  switch (panels) {
    case 1: return Multiplier<1, 1>::run(block);
    case 2: return Multiplier<1, 2>::run(block);
    case 3: return Multiplier<1, 3>::run(block);
    default: return Multiplier<1, 4>::run(block);
  }
}

// One task: its panels, its row tiles, and memory for its sums.
class Task {
 public:
  Task(const Linear& work, int64_t task) : work_(work), shape_(work) {
    // Consecutive tasks share rows.
    first_panel_ = task % shape_.panel_groups * shape_.task_panels;
    const RowTile tiles = row_tile(shape_.row_tiles, TASK_ROW_TILES, task / shape_.panel_groups);
    first_tile_ = tiles.first;
    row_tiles_ = tiles.rows;
    panels_ = at_most(shape_.task_panels, shape_.panels - first_panel_);
    x_ = static_cast<const Bf16*>(shape_.in_place ? work.x : work.packed_x) + first_tile_ * shape_.tile_size;
    y_ = static_cast<Bf16*>(work.y) + first_tile_ * TILE_ROWS * work.y_stride;
  }

  void run() {
    // One row tile takes four panels at once, since it has four tiles for sums; several row tiles take two.
    const int64_t at_once = shape_.row_tiles == 1 ? 4 : 2;
    shape_tiles(shape_.tile_rows);
    if (work_.weight.dtype == fissile::INT8) multiply_int8(at_once);
    else multiply_bf16(at_once);
    release_tiles();
    finished_.write_all();
  }

 private:
  // Adjacent panels, and some of their steps.
  struct Part {
    int64_t panel;
    int64_t panels;
    int64_t step;
    int64_t steps;
  };

  void multiply_bf16(int64_t at_once) {
    const bool has_tails = pad_tails();
    for (int64_t step = 0; step < shape_.steps; step += steps_from(step))
      for (int64_t panel = 0; panel < panels_; panel += at_once)
        multiply_part({panel, at_most(at_once, panels_ - panel), step, steps_from(step)}, has_tails);
  }

  // Number of steps of the part that begins at `step`.
  int64_t steps_from(int64_t step) const {
    return shape_.row_tiles <= 2 ? shape_.steps : at_most(STEPS_AT_ONCE, shape_.steps - step);
  }

  // Multiplies all row tiles by one part. Sums are stored in memory until the next steps; those of the last steps are
  // written to y while they are still in the cache.
  void multiply_part(const Part& part, bool has_tails) {
    const bool last = part.step + part.steps == shape_.steps;
    for (int64_t tile = 0, tiles; tile < row_tiles_; tile += tiles) {
      // Three remaining tiles are computed together, as one alone would cost nearly as much as two.
      tiles = row_tiles_ - tile == 3 ? 3 : at_most(2, row_tiles_ - tile);
      float* const sums = tile_of_sums(tile, part.panel);
      float* const ready = finished_.sums == ready_[0] ? ready_[1] : ready_[0];
      Block block = block_of(tile, part.step, part.steps);
      block.weights = reinterpret_cast<const Bf16*>(weights_at(part.panel, part.step));
      block.panel_size = shape_.apart / static_cast<int64_t>(sizeof(Bf16));
      block.tail = last && has_tails ? tails_ + part.panel * WEIGHT_TILE : nullptr;
      block.from = part.step > 0 ? sums : nullptr;
      block.from_stride = TASK_PANELS * SUMS_TILE;
      block.to = last ? ready : sums;
      block.to_stride = last ? 2 * SUMS_TILE : TASK_PANELS * SUMS_TILE;
      block.ahead = ahead_of(part, tile / 2);
      block.unused = unused_;
      multiply(block, tiles, part.panels);
      if (last) finish(ready, 2 * SUMS_TILE, {tile, tiles}, part);
    }
  }

  // What each pass of a part prefetches: together the passes, of two row tiles each, prefetch the whole next part. A
  // single row tile reaches its own weights before they are all prefetched, so it prefetches these a little ahead.
  Ahead ahead_of(const Part& part, int64_t pass) const {
    const Part next = after(part);
    const char* const begin = weights_at(next.panel, next.step);
    if (shape_.row_tiles == 1)
      return {weights_at(part.panel, part.step) + PREFETCH, part.steps - PREFETCH / (TILE_LINES * LINE), begin,
              shape_.apart, 1, LINE, LINE, TILE_LINES, 1, 0};
    const int64_t passes = at_least(row_tiles_ / 2, 1), count = stripes(passes), lines = next.steps * TILE_LINES / count;
    const int64_t steps = passes * part.steps, done = lines * pass * part.steps;
    return {nullptr, 0, begin + done / steps * LINE, shape_.apart, count, lines * LINE, LINE, lines, steps, done % steps};
  }

  // The part that follows `part`, in this task or at the start of the next one.
  Part after(const Part& part) const {
    if (part.panel + part.panels < panels_) return {part.panel + part.panels, part.panels, part.step, part.steps};
    const int64_t step = part.step + part.steps < shape_.steps ? part.step + part.steps : 0;
    return {step ? 0 : shape_.task_panels, part.panels, step, steps_from(step)};
  }

  // Panel `panel` of this task; numbers from panels_ on are panels of the next task.
  const char* panel_of(int64_t panel) const {
    const int64_t place = first_panel_ + panel;
    const int64_t bytes = work_.gated ? place / 2 * shape_.panel_bytes + place % 2 * shape_.apart : place * shape_.apart;
    return static_cast<const char*>(work_.weight.panels) + bytes;
  }

  const char* weights_at(int64_t panel, int64_t step) const { return panel_of(panel) + step * TILE_LINES * LINE; }

  // Writes the rest of the previous sums, and registers `sums` to be written during the next block.
  void finish(const float* sums, int64_t tile_stride, RowTile tiles, const Part& part) {
    finished_.write_all();
    const int64_t first = tiles.first * TILE_ROWS;
    const int64_t rows = at_most(tiles.rows * TILE_ROWS, work_.rows - first_tile_ * TILE_ROWS - first);
    finished_ = {&work_, sums, tile_stride, 0, rows, first_panel_ + part.panel, part.panels,
                 y_ + first * work_.y_stride};
  }

  // Copies the incomplete last tile of each panel and pads it with zeros. Returns false if the last tiles are complete.
  bool pad_tails() {
    const int64_t numbers = shape_.panel_bytes / static_cast<int64_t>(sizeof(Bf16)), left = numbers % WEIGHT_TILE;
    for (int64_t panel = 0; left && panel < panels_; panel++) {
      Bf16* to = tails_ + panel * WEIGHT_TILE;
      __builtin_memcpy(to, reinterpret_cast<const Bf16*>(panel_of(panel)) + numbers - left, left * sizeof *to);
      __builtin_memset(to + left, 0, (WEIGHT_TILE - left) * sizeof *to);
    }
    return left > 0;
  }

  void multiply_int8(int64_t at_once) {
    const DenormalsAreZeros mode;
    const int64_t inner = fissile::padded_inner(fissile::INT8, work_.weight.inner);
    __builtin_memset(sums_, 0, row_tiles_ * TASK_PANELS * SUMS_TILE * sizeof *sums_);
    for (int64_t panel = 0; panel < panels_; panel += at_once)
      for (int64_t k = 0; k < inner; k += K_BLOCK) {
        const int64_t count = at_most(at_once, panels_ - panel), depth = at_most(K_BLOCK, inner - k);
        const char* const numbers = panel_of(panel) + fissile::block_offset(fissile::INT8, k);
        const char* const next = k + K_BLOCK < inner ? panel_of(panel) + fissile::block_offset(fissile::INT8, k + K_BLOCK)
                                                     : panel_of(panel + count);
        for (int64_t p = 0; p < count; p++)
          widen_block(numbers + p * shape_.apart, next + p * shape_.apart, depth, wide_ + p * K_BLOCK * PANEL);
        for (int64_t tile = 0; tile < row_tiles_; tile += 2) {
          const int64_t tiles = at_most(2, row_tiles_ - tile);
          Block block = block_of(tile, k / STEP, parts(depth, STEP));
          block.weights = wide_;
          block.panel_size = BLOCK_STEPS * WEIGHT_TILE;
          block.to = part_;
          block.to_stride = TASK_PANELS_OF_FEW * SUMS_TILE;
          multiply(block, tiles, count);
          for (int64_t t = 0; t < tiles; t++)
            for (int64_t p = 0; p < count; p++)
              add_scaled(part_ + (t * TASK_PANELS_OF_FEW + p) * SUMS_TILE,
                         load(scales_of(numbers + p * shape_.apart)), tile_of_sums(tile + t, panel + p));
        }
      }
    finish(sums_, TASK_PANELS * SUMS_TILE, {0, row_tiles_}, {0, panels_, 0, shape_.steps});
    // Written while denormals count as zeros, as run_few() does, so that the bits are the same.
    finished_.write_all();
  }

  // to += part * scale, for the rows of a tile.
  void add_scaled(const float* part, Floats scale, float* to) const {
    for (int64_t row = 0; row < shape_.tile_rows; row++, part += PANEL, to += PANEL)
      store(to, fma(load(part), scale, load(to)));
  }

  // The block of rows of x from `tile` on, over `steps` steps. The caller sets the weights.
  Block block_of(int64_t tile, int64_t step, int64_t steps) {
    Block block{};
    block.x = x_ + tile * shape_.tile_size + step * shape_.step_size;
    block.x_row_bytes = shape_.row_size * static_cast<int64_t>(sizeof(Bf16));
    block.x_tile_size = shape_.tile_size;
    block.x_step_size = shape_.step_size;
    block.steps = steps;
    block.before = &finished_;
    return block;
  }

  float* tile_of_sums(int64_t tile, int64_t panel) { return sums_ + (tile * TASK_PANELS + panel) * SUMS_TILE; }

  const Linear& work_;
  const Shape shape_;
  int64_t first_panel_, first_tile_, panels_, row_tiles_;
  const Bf16* x_;
  Bf16* y_;
  alignas(64) Bf16 tails_[TASK_PANELS * WEIGHT_TILE];
  alignas(64) float sums_[TASK_ROW_TILES * TASK_PANELS * SUMS_TILE];
  // Sums of three row tiles by two panels, or of one by four. Two buffers alternate: one is filled while the other is
  // written to y.
  alignas(64) float ready_[2][6 * SUMS_TILE];
  Finished finished_{};
  alignas(64) float unused_[SUMS_TILE];
  // An int8 block: its weights as bfloat16, and the sums of two row tiles.
  alignas(64) Bf16 wide_[TASK_PANELS_OF_FEW * K_BLOCK * PANEL];
  alignas(64) float part_[2 * TASK_PANELS_OF_FEW * SUMS_TILE];
};

// Copies the numbers of one row for one step, with zeros after the `left` numbers.
FISSILE_INLINE void pack_step(const Bf16* from, int64_t left, Bf16* to) {
  if (left >= STEP) {
    __builtin_memcpy(to, from, STEP * sizeof *to);
    return;
  }
  __builtin_memset(to, 0, STEP * sizeof *to);
  for (int64_t k = 0; k < left; k++) to[k] = from[k];
}

int64_t scratch(const Linear& work) {
  if (has_few_rows(work)) return work.rows * fissile::padded_inner(work.weight.dtype, work.weight.inner);
  const Shape shape(work);
  // In floats, each of which holds two bfloat16.
  return shape.in_place ? 0 : shape.row_tiles * shape.tile_size / 2;
}

int64_t pack_tasks(const Linear& work) {
  if (has_few_rows(work)) return work.rows;
  const Shape shape(work);
  return shape.in_place ? 0 : shape.row_tiles;
}

// Copies tile `task` of x. The outer loop is over steps, so that writes are sequential.
void pack_x(const Linear& work, int64_t task) {
  if (has_few_rows(work)) return widen_row(work, task);
  const Shape shape(work);
  const int64_t first = task * TILE_ROWS, rows = at_most(shape.tile_rows, work.rows - first);
  const Bf16* const x = static_cast<const Bf16*>(work.x) + first * work.x_stride;
  Bf16* to = reinterpret_cast<Bf16*>(work.packed_x) + task * shape.tile_size;
  for (int64_t k = 0; k < shape.steps * STEP; k += STEP)
    for (int64_t row = 0; row < shape.tile_rows; row++, to += STEP)
      pack_step(x + row * work.x_stride + k, row < rows ? work.weight.inner - k : 0, to);
}

int64_t tasks(const Linear& work) {
  if (has_few_rows(work)) return few_tasks(work);
  const Shape shape(work);
  return shape.row_groups * shape.panel_groups;
}

void run(const Linear& work, int64_t task) {
  if (has_few_rows(work)) return run_few(work, task);
  Task(work, task).run();
}

// Not for a single row tile: four adjacent panels are then faster than pairs of panels that are far apart.
bool multiplies_gated(const Linear& work) {
  return takes_bf16(work) && work.rows > TILE_ROWS && work.weight.columns % (2 * PANEL) == 0;
}

}  // namespace

void use_own_linear(fissile::Kernels& table) {
  use<scratch, pack_tasks, pack_x, tasks, run>(table);
  table.multiplies_gated = multiplies_gated;
}

}  // namespace FISSILE_ISA
