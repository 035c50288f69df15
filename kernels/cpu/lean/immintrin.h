// Stands before GCC's <immintrin.h> where code for AVX2 is compiled.
//
// GCC's own declares every extension up to AVX512-FP16 and AMX, a megabyte of text that costs each file
// about a second. These are the parts that processors of the x86-64-v3 level have. Other levels and
// compilers get their usual header.
#if defined(__AVX512F__) || !defined(__AVX2__) || !defined(__GNUC__) || defined(__clang__)
#include_next <immintrin.h>
#elif !defined(_IMMINTRIN_H_INCLUDED)
#define _IMMINTRIN_H_INCLUDED  // the parts refuse to be included by anything else

#include <x86gprintrin.h>

#include <mmintrin.h>
#include <xmmintrin.h>
#include <emmintrin.h>
#include <pmmintrin.h>
#include <tmmintrin.h>
#include <smmintrin.h>
#include <wmmintrin.h>

#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#endif
