// Norms, rotary embedding, activation, sums over experts, and writes to the KV cache; see elementwise.cpp.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

int64_t norm_tasks(const fissile::Norm& work);
void norm(const fissile::Norm& work, int64_t task);
int64_t rope_tasks(const fissile::Rope& work);
void rope(const fissile::Rope& work, int64_t task);
int64_t silu_and_mul_tasks(const fissile::SiluAndMul& work);
void silu_and_mul(const fissile::SiluAndMul& work, int64_t task);
int64_t softcap_tasks(const fissile::Softcap& work);
void softcap(const fissile::Softcap& work, int64_t task);
int64_t combine_tasks(const fissile::Combine& work);
void combine(const fissile::Combine& work, int64_t task);
int64_t write_kv_tasks(const fissile::WriteKV& work);
void write_kv(const fissile::WriteKV& work, int64_t task);

}  // namespace FISSILE_ISA
