// Attention over the paged KV cache; see attention.cpp.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

// Approximate rows of a query tile: enough to reuse widened or packed keys often, few enough to split a prefill among
// threads. AMX computes two tiles of 16 rows in little more time than one, so its query tiles are larger.
#ifdef FISSILE_TILES
constexpr int64_t QUERY_ROWS = 96;
#else
constexpr int64_t QUERY_ROWS = 48;
#endif

int64_t attention_state_size(const fissile::Attention& work, const fissile::QueryTile& tile);
int64_t attention_tasks(const fissile::Attention& work);
void attention(const fissile::Attention& work, int64_t task);
int64_t attention_merge_tasks(const fissile::Attention& work);
void attention_merge(const fissile::Attention& work, int64_t task);
int64_t select_tokens_tasks(const fissile::SelectTokens& work);
void select_tokens(const fissile::SelectTokens& work, int64_t task);

// Replaces the attention of an instruction set's table by attention on pairs of bfloat16 (attention_pairs.hpp,
// attention_tiles.hpp).
void use_own_attention(fissile::Kernels& table);

}  // namespace FISSILE_ISA
