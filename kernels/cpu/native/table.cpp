// The kernel table of the instruction set that this source is compiled for.
#include "attention.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "routing.hpp"
#include "sampling.hpp"

#define FISSILE_TEXT_OF(name) #name
#define FISSILE_TEXT(name) FISSILE_TEXT_OF(name)

namespace FISSILE_ISA {

extern const fissile::Kernels kernels;
const fissile::Kernels kernels = {
    .name = FISSILE_TEXT(FISSILE_ISA),
    .pack_panel = pack_panel,
    .linear_scratch = linear_scratch,
    .linear_pack_tasks = linear_pack_tasks,
    .linear_pack = linear_pack,
    .linear_tasks = linear_tasks,
    .linear = linear,
    .multiplies_gated = [](const fissile::Linear&) { return false; },
    .norm_tasks = norm_tasks,
    .norm = norm,
    .rope_tasks = rope_tasks,
    .rope = rope,
    .silu_and_mul_tasks = silu_and_mul_tasks,
    .silu_and_mul = silu_and_mul,
    .softcap_tasks = softcap_tasks,
    .softcap = softcap,
    .combine_tasks = combine_tasks,
    .combine = combine,
    .write_kv_tasks = write_kv_tasks,
    .write_kv = write_kv,
    .query_rows = QUERY_ROWS,
    .attention_state_size = attention_state_size,
    .attention_tasks = attention_tasks,
    .attention = attention,
    .attention_merge_tasks = attention_merge_tasks,
    .attention_merge = attention_merge,
    .select_tokens_tasks = select_tokens_tasks,
    .select_tokens = select_tokens,
    .route_tasks = route_tasks,
    .route = route,
    .sample = sample,
    .largest_of_row = largest_of_row,
    .logprobs = logprobs,
};

}  // namespace FISSILE_ISA
