// Attention over the paged KV cache; see attention.cpp.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

// Rows of a query tile, about: enough to use the keys often that one has widened or packed, few enough to share a prefill.
// Tiles of AMX take a pair of sixteen rows in little more time than sixteen.
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

// Puts attention by pairs of bfloat16 (attention_pairs.hpp, attention_tiles.hpp) into the table of another instruction set.
void use_own_attention(fissile::Kernels& table);

}  // namespace FISSILE_ISA
