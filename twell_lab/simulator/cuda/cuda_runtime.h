// Kernels often include this first. What they need of it is in cuda_on_cpu.h, which is always there.
#pragma once
