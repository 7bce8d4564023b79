// All drafts of one step by a draft head of one layer (worker/model/models/eagle3.py), in one call. The head first
// computes the step's rows, and then each sequence's drafts one after another, with its own states and drafts in place
// of the target's. The operations and numbers are those of single calls, so the drafts are the same. Sizes and strides
// are in elements.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "api.hpp"
#include "dispatch.hpp"
#include "kernels.hpp"
#include "layers.hpp"
#include "pool.hpp"

using namespace fissile;

namespace {

// kernels/cpu/drafts.py declares DraftHead and DraftStep with the same fields.
struct DraftHead {
  // A decoder of one layer with a `stream_norm`. A row of its output has the states after the last norm and the
  // residual stream after the layer.
  const Decoder* decoder;
  // Projects the target's concatenated states to [hidden].
  Weight combine;
  // Embeddings [ids, hidden] by rows. If null, embeddings are the rows of the packed weight.
  const void* embedding;
  Weight packed_embedding;
  // [positions, half]. Positions from `positions` on get no drafts.
  const float* cos;
  const float* sin;
  int64_t positions;
  int64_t half;
  // The head's output weight, and the target's id of each of its columns; null if column and id are equal.
  Weight head;
  const int64_t* target_ids;
  // Number of the target's ids. Only ids below `limit` may be drafted.
  int64_t vocab;
  int64_t limit;
};

struct DraftStep {
  // Per sequence: its first row in the target's step, that row's position, and the number of accepted rows.
  int64_t sequences;
  const int64_t* begins;
  const int64_t* starts;
  const int64_t* counts;
  // Per sequence, the token after its last accepted row; and the tokens of all rows of the step.
  const int64_t* next_tokens;
  const int64_t* token_ids;
  // The target's states, from the first column that `combine` reads.
  const void* states;
  int64_t states_stride;
  KVCache cache;
  const int64_t* block_tables;
  int64_t table_stride;
  // Indices of the sequences that get drafts, ascending, and the number of drafts of each, at most `most`.
  int64_t asked;
  const int64_t* asking;
  const int64_t* wanted;
  int64_t most;
  // Per sequence of the step; see Sample.
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
  const uint64_t* seeds;
  const int64_t* choices;
  // [asked, 2 * hidden]: the head's output for the last accepted row of each sequence in `asking`.
  void* last;
  // [asked, most]: the drafts, with NO_TOKEN after each sequence's last one.
  int64_t* ids;
};

// Uninitialized memory for `count` elements.
template <class Number>
std::unique_ptr<Number[]> room(int64_t count) {
  return std::unique_ptr<Number[]>(new Number[static_cast<size_t>(count)]);
}

std::unique_ptr<char[]> numbers(int64_t dtype, int64_t count) { return room<char>(count * size_of(dtype)); }

void copy(void* to, const void* from, int64_t dtype, int64_t count) {
  std::memcpy(to, from, static_cast<size_t>(count * size_of(dtype)));
}

float widened(const void* numbers, int64_t dtype, int64_t i) {
  if (dtype == FLOAT32) return static_cast<const float*>(numbers)[i];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(numbers)[i]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Copies row `id` of a packed weight, in the weight's dtype.
void unpack_row(const Weight& weight, int64_t id, char* out) {
  constexpr int64_t WORD = 4;
  const char* panel = static_cast<const char*>(weight.panels) + id / PANEL * panel_bytes(weight.dtype, weight.inner);
  const int64_t bytes = weight.inner * size_of(weight.dtype);
  for (int64_t k = 0; k < bytes; k += WORD)
    std::memcpy(out + k, panel + k * PANEL + id % PANEL * WORD, static_cast<size_t>(std::min(WORD, bytes - k)));
}

// Rows that the head computes together, grouped by sequence. `token_ids` holds the token after each position.
struct Rows {
  std::vector<int64_t> cu_seqlens{0};
  std::vector<int64_t> seq_lens;
  std::vector<int64_t> positions;
  std::vector<int64_t> token_ids;
  std::vector<int64_t> slots;

  int64_t count() const { return cu_seqlens.back(); }
  int64_t sequences() const { return static_cast<int64_t>(seq_lens.size()); }

  void add(int64_t position, int64_t token_id, const int64_t* table, int64_t block_size) {
    positions.push_back(position);
    token_ids.push_back(token_id);
    slots.push_back(table[position / block_size] * block_size + position % block_size);
  }

  void end_sequence() {
    cu_seqlens.push_back(static_cast<int64_t>(positions.size()));
    seq_lens.push_back(positions.back() + 1);
  }
};

class Drafts {
 public:
  Drafts(const DraftHead& head, const DraftStep& step)
      : head_(head), step_(step), dtype_(head.decoder->dtype), hidden_(head.decoder->hidden) {}

  // Returns false if an allocation failed.
  bool all() {
    std::fill_n(step_.ids, step_.asked * step_.most, NO_TOKEN);
    return take_in() && chain();
  }

 private:
  int64_t end_of(int64_t sequence) const { return step_.starts[sequence] + step_.counts[sequence]; }
  const int64_t* table_of(int64_t sequence) const { return step_.block_tables + sequence * step_.table_stride; }

  // Runs the head over the step's accepted rows, with the target's states. Copies the outputs of the sequences in
  // `asking` to `step.last`.
  bool take_in() {
    Rows rows;
    for (int64_t s = 0; s < step_.sequences; s++) {
      const int64_t* own = step_.token_ids + step_.begins[s];
      for (int64_t i = 0; i < step_.counts[s]; i++)
        rows.add(step_.starts[s] + i, i + 1 < step_.counts[s] ? own[i + 1] : step_.next_tokens[s], table_of(s),
                 step_.cache.block_size);
      rows.end_sequence();
    }
    std::vector<int64_t> asked(step_.asked);
    for (int64_t a = 0; a < step_.asked; a++) asked[a] = rows.cu_seqlens[step_.asking[a] + 1] - 1;
    const auto x = numbers(dtype_, rows.count() * hidden_), out = numbers(dtype_, rows.count() * 2 * hidden_);
    if (!combine(rows, x.get())) return false;
    if (!run(rows, x.get(), step_.block_tables, step_.table_stride, &asked, out.get())) return false;
    for (int64_t a = 0; a < step_.asked; a++)
      copy(offset(step_.last, dtype_, a * 2 * hidden_), offset(out.get(), dtype_, asked[a] * 2 * hidden_), dtype_,
           2 * hidden_);
    return true;
  }

  bool combine(const Rows& rows, void* x) const {
    const int64_t width = head_.combine.inner;
    auto from = [&](int64_t s) { return offset(step_.states, dtype_, step_.begins[s] * step_.states_stride); };
    bool is_one_piece = true;
    for (int64_t s = 0; s < step_.sequences; s++)
      is_one_piece = is_one_piece && step_.begins[s] - step_.begins[0] == rows.cu_seqlens[s];
    std::unique_ptr<char[]> gathered;
    if (!is_one_piece) {
      gathered = numbers(dtype_, rows.count() * width);
      for (int64_t s = 0; s < step_.sequences; s++)
        for (int64_t i = 0; i < step_.counts[s]; i++)
          copy(offset(gathered.get(), dtype_, (rows.cu_seqlens[s] + i) * width),
               offset(from(s), dtype_, i * step_.states_stride), dtype_, width);
    }
    return multiply({dtype_, is_one_piece ? from(0) : gathered.get(), is_one_piece ? step_.states_stride : width,
                     rows.count(), rows.count(), head_.combine, x, hidden_, false, nullptr});
  }

  // Runs the layer over rows with states x [rows, hidden]. Writes out [rows, 2 * hidden], only for the rows `asked`
  // unless that is null.
  bool run(const Rows& rows, const void* x, const int64_t* tables, int64_t stride, const std::vector<int64_t>* asked,
           void* out) const {
    const auto embedded = numbers(dtype_, rows.count() * hidden_);
    const auto cos = room<float>(rows.count() * head_.half), sin = room<float>(rows.count() * head_.half);
    for (int64_t row = 0; row < rows.count(); row++) {
      embed(rows.token_ids[row], static_cast<char*>(offset(embedded.get(), dtype_, row * hidden_)));
      std::copy_n(head_.cos + rows.positions[row] * head_.half, head_.half, cos.get() + row * head_.half);
      std::copy_n(head_.sin + rows.positions[row] * head_.half, head_.half, sin.get() + row * head_.half);
    }
    return run_layers(
        *head_.decoder,
        {rows.count(), rows.count(), x, embedded.get(), cos.get(), sin.get(), head_.half, step_.cache, rows.slots.data(),
         tables, stride, rows.sequences(), rows.cu_seqlens.data(), rows.seq_lens.data(), asked ? asked->data() : nullptr,
         asked ? static_cast<int64_t>(asked->size()) : 0, nullptr, out});
  }

  void embed(int64_t id, char* out) const {
    if (head_.embedding) copy(out, offset(head_.embedding, dtype_, id * hidden_), dtype_, hidden_);
    else unpack_row(head_.packed_embedding, id, out);
  }

  int64_t& draft(int64_t asking, int64_t drawn) const { return step_.ids[asking * step_.most + drawn]; }

  // Drafts for all sequences that want any, one draft of each sequence per round.
  bool chain() {
    for (int64_t a = 0; a < step_.asked; a++)
      if (step_.wanted[a] > 0) going_.push_back(a);
    const int64_t most = static_cast<int64_t>(going_.size()), width = 2 * hidden_;
    const auto states = numbers(dtype_, most * width);
    for (int64_t i = 0; i < most; i++)
      copy(offset(states.get(), dtype_, i * width), offset(step_.last, dtype_, going_[i] * width), dtype_, width);
    const auto x = numbers(dtype_, most * hidden_);
    for (int64_t drawn = 0; !going_.empty(); drawn++) {
      if (!draw(states.get(), drawn)) return false;
      keep_going(states.get(), drawn, x.get());
      if (!going_.empty() && !go_on(drawn, x.get(), states.get())) return false;
    }
    return true;
  }

  bool has_next(int64_t asking, int64_t drawn) const {
    return draft(asking, drawn) != NO_TOKEN && drawn + 1 < step_.wanted[asking] &&
           end_of(step_.asking[asking]) + drawn < head_.positions;
  }

  // Removes the sequences that have all their drafts or whose draft is NO_TOKEN. Copies the head's own states of the
  // others to x.
  void keep_going(const char* states, int64_t drawn, char* x) {
    size_t kept = 0;
    for (size_t i = 0; i < going_.size(); i++) {
      const int64_t a = going_[i];
      if (!has_next(a, drawn)) continue;
      copy(offset(x, dtype_, static_cast<int64_t>(kept) * hidden_),
           offset(states, dtype_, (2 * static_cast<int64_t>(i) + 1) * hidden_), dtype_, hidden_);
      going_[kept++] = a;
    }
    going_.resize(kept);
  }

  // Runs the head over one row of each remaining sequence, with its newest draft.
  bool go_on(int64_t drawn, const void* x, void* states) {
    Rows rows;
    for (const int64_t a : going_) {
      const int64_t s = step_.asking[a];
      rows.add(end_of(s) + drawn, draft(a, drawn), table_of(s), step_.cache.block_size);
      rows.end_sequence();
    }
    const int64_t blocks = *std::max_element(rows.positions.begin(), rows.positions.end()) / step_.cache.block_size + 1;
    return run(rows, x, tables(blocks), blocks_stride(blocks), nullptr, states);
  }

  bool all_go() const { return static_cast<int64_t>(going_.size()) == step_.sequences; }

  int64_t blocks_stride(int64_t blocks) const { return all_go() ? step_.table_stride : blocks; }

  // Block tables of the remaining sequences.
  const int64_t* tables(int64_t blocks) {
    if (all_go()) return step_.block_tables;
    tables_.resize(going_.size() * static_cast<size_t>(blocks));
    int64_t* to = tables_.data();
    for (const int64_t a : going_) to = std::copy_n(table_of(step_.asking[a]), blocks, to);
    return tables_.data();
  }

  // Draws the next draft of each remaining sequence.
  bool draw(const void* states, int64_t drawn) {
    const int64_t rows = static_cast<int64_t>(going_.size());
    std::vector<int64_t> ids(going_.size());
    auto temperature = [&](int64_t a) { return step_.temperature[step_.asking[a]]; };
    const bool is_greedy = std::none_of(going_.begin(), going_.end(), [&](int64_t a) { return temperature(a) > 0.0f; });
    if (is_greedy && !head_.target_ids) {
      const Weight& head = head_.head;
      if (fissile_linear_argmax(dtype_, states, 2 * hidden_, rows, hidden_, std::min(head.columns, head_.limit),
                                head.dtype, head.panels, head.bias, head.order, ids.data()))
        return false;
    } else if (!compute_logits(states, rows)) {
      return false;
    } else {
      sample(rows, drawn, ids.data());
    }
    // NO_MEMORY becomes NO_TOKEN, which ends the sequence's drafts.
    for (int64_t i = 0; i < rows; i++) draft(going_[i], drawn) = std::max(ids[i], NO_TOKEN);
    return true;
  }

  // Computes logits for all ids of the target, -infinity for ids that may not be drafted.
  bool compute_logits(const void* states, int64_t rows) {
    const Weight& head = head_.head;
    const bool is_direct = dtype_ == FLOAT32 && !head_.target_ids;
    if (!logits_) logits_ = room<float>(rows * head_.vocab);
    if (!is_direct && !products_) products_ = numbers(dtype_, rows * head.columns);
    if (!multiply({dtype_, states, 2 * hidden_, rows, rows, head,
                   is_direct ? static_cast<void*>(logits_.get()) : products_.get(),
                   is_direct ? head_.vocab : head.columns, false, nullptr}))
      return false;
    for (int64_t row = 0; row < rows; row++) {
      float* logits = logits_.get() + row * head_.vocab;
      if (!is_direct) spread(offset(products_.get(), dtype_, row * head.columns), logits);
      std::fill(logits + head_.limit, logits + head_.vocab, -std::numeric_limits<float>::infinity());
    }
    return true;
  }

  void spread(const void* products, float* logits) const {
    const int64_t count = head_.head.columns;
    if (!head_.target_ids) {
      for (int64_t i = 0; i < count; i++) logits[i] = widened(products, dtype_, i);
      return;
    }
    std::fill_n(logits, head_.vocab, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < count; i++) logits[head_.target_ids[i]] = widened(products, dtype_, i);
  }

  // Samples with the target's parameters and the drafts' positions, as the target will.
  void sample(int64_t rows, int64_t drawn, int64_t* ids) {
    std::vector<float> temperature, top_p, min_p;
    std::vector<int64_t> top_k, positions, choices;
    std::vector<uint64_t> seeds;
    for (const int64_t a : going_) {
      const int64_t s = step_.asking[a];
      temperature.push_back(step_.temperature[s]);
      top_k.push_back(step_.top_k[s]);
      top_p.push_back(step_.top_p[s]);
      min_p.push_back(step_.min_p[s]);
      seeds.push_back(step_.seeds[s]);
      choices.push_back(step_.choices[s]);
      // The token after the last accepted row is the newest one, so the first draft is one position further.
      positions.push_back(end_of(s) + 1 + drawn);
    }
    const Sample work{logits_.get(), head_.vocab, head_.vocab, temperature.data(), top_k.data(), top_p.data(),
                      min_p.data(), seeds.data(), positions.data(), choices.data(), ids, {}, nullptr, nullptr,
                      nullptr, 0};
    share(rows, kernels().sample, work);
  }

  const DraftHead& head_;
  const DraftStep& step_;
  const int64_t dtype_;
  const int64_t hidden_;
  // Indices in `asking` of the sequences that want another draft.
  std::vector<int64_t> going_;
  std::vector<int64_t> tables_;
  // Room for the rows of the first draft; later drafts have no more rows.
  std::unique_ptr<float[]> logits_;
  std::unique_ptr<char[]> products_;
};

}  // namespace

// Writes a step's drafts to `step.ids`. Returns 0, or 1 if memory ran out.
FISSILE_API int fissile_drafts(const DraftHead* head, const DraftStep* step) {
  return failed([&] { return Drafts(*head, *step).all(); });
}
