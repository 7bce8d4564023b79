// Sampling; see sampling.cpp.
#pragma once

#include "kernels.hpp"
#include "vec.hpp"

namespace FISSILE_ISA {

void sample(const fissile::Sample& work, int64_t row);
void largest_of_row(const fissile::Largest& work, int64_t row);
void logprobs(const fissile::Logprobs& work, int64_t row);

}  // namespace FISSILE_ISA
