// Selects each row's experts and their weights (kernels/interface.py, Routing). Each row is computed alone, in float32,
// with sums in the order of experts or of slots. Among equals the lower id comes first. NaN counts as the highest, as
// in PyTorch.
#include "routing.hpp"

#include "scratch.hpp"

namespace FISSILE_ISA {
namespace {

bool is_nan(float x) { return x != x; }

bool above(float a, float b) { return a > b || (is_nan(a) && !is_nan(b)); }

// Index of the highest value that is not `taken`; marks it as taken.
int64_t take_highest(const float* values, int64_t count, bool* taken) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || above(values[i], values[best]))) best = i;
  taken[best] = true;
  return best;
}

float highest_of(const float* values, int64_t count) {
  float best = lowest();
  for (int64_t i = 0; i < count; i++) best = above(values[i], best) ? values[i] : best;
  return best;
}

// softmax in place: exp(values - max) divided by the sum.
void softmax(float* values, int64_t count) {
  const float highest = highest_of(values, count);
  float total = 0.0f;
  for (int64_t i = 0; i < count; i += WIDTH)
    store_up_to(values + i, exp(load_up_to(values + i, count - i) - splat(highest)), count - i);
  for (int64_t i = 0; i < count; i++) total += values[i];
  for (int64_t i = 0; i < count; i++) values[i] /= total;
}

void sigmoid(float* values, int64_t count) {
  const Floats one = splat(1.0f);
  for (int64_t i = 0; i < count; i += WIDTH)
    store_up_to(values + i, one / (one + exp(-load_up_to(values + i, count - i))), count - i);
}

// Scratch memory of a row.
struct Row {
  float* scores;
  // Scores plus biases, by which experts are selected; -infinity outside the best groups.
  float* choice;
  float* groups;
  bool* taken;
};

// The sum of the `count` highest values of a group, one or two.
float group_score(const float* choice, int64_t size, int64_t count, bool* taken) {
  __builtin_memset(taken, 0, static_cast<uint64_t>(size));
  const float best = choice[take_highest(choice, size, taken)];
  return size > 1 && count > 1 ? best + choice[take_highest(choice, size, taken)] : best;
}

// Excludes all groups but the best (arXiv:2405.04434 and arXiv:2412.19437, both section 2.1.2).
void keep_best_groups(const fissile::Route& work, const Row& row) {
  const int64_t size = work.experts / work.num_groups;
  for (int64_t g = 0; g < work.num_groups; g++)
    row.groups[g] = group_score(row.choice + g * size, size, work.group_best, row.taken);
  __builtin_memset(row.taken, 0, static_cast<uint64_t>(work.num_groups));
  for (int64_t i = 0; i < work.top_groups; i++) take_highest(row.groups, work.num_groups, row.taken);
  for (int64_t g = 0; g < work.num_groups; g++)
    for (int64_t i = 0; i < size && !row.taken[g]; i++) row.choice[g * size + i] = lowest();
}

void choose(const fissile::Route& work, const Row& row, int64_t* ids) {
  __builtin_memset(row.taken, 0, static_cast<uint64_t>(work.experts));
  for (int64_t slot = 0; slot < work.top_k; slot++) ids[slot] = take_highest(row.choice, work.experts, row.taken);
}

void route_row(const fissile::Route& work, int64_t index, const Row& row) {
  const float* logits = work.logits + index * work.row_stride;
  int64_t* ids = work.ids + index * work.top_k;
  float* weights = work.weights + index * work.top_k;
  __builtin_memcpy(row.scores, logits, static_cast<uint64_t>(work.experts) * sizeof(float));
  if (work.scoring == fissile::SOFTMAX) softmax(row.scores, work.experts);
  if (work.scoring == fissile::SIGMOID) sigmoid(row.scores, work.experts);
  for (int64_t e = 0; e < work.experts; e++)
    row.choice[e] = row.scores[e] + (work.correction_bias ? work.correction_bias[e] : 0.0f);
  if (work.num_groups > 1) keep_best_groups(work, row);
  choose(work, row, ids);
  float total = 0.0f;
  for (int64_t slot = 0; slot < work.top_k; slot++) total += weights[slot] = row.scores[ids[slot]];
  if (work.scoring == fissile::TOPK_SOFTMAX) return softmax(weights, work.top_k);
  for (int64_t slot = 0; slot < work.top_k; slot++)
    weights[slot] = (work.renormalize ? weights[slot] / (total + 1e-20f) : weights[slot]) * work.scale;
}

// Rows of a task, which take a few microseconds.
constexpr int64_t TASK_ROWS = 4;

}  // namespace

int64_t route_tasks(const fissile::Route& work) { return (work.rows + TASK_ROWS - 1) / TASK_ROWS; }

void route(const fissile::Route& work, int64_t task) {
  float* memory = fissile::scratch(fissile::OF_TASK, 4 * work.experts);
  if (!memory) return;
  const Row row{memory, memory + work.experts, memory + 2 * work.experts,
                reinterpret_cast<bool*>(memory + 3 * work.experts)};
  for (int64_t i = task * TASK_ROWS; i < work.rows && i < (task + 1) * TASK_ROWS; i++) route_row(work, i, row);
}

}  // namespace FISSILE_ISA
