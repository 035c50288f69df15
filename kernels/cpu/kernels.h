// The kernels' interface: plain structs, no torch. Sizes and strides count elements.
#pragma once

#include <cstdint>

namespace girih {

enum class DType { bfloat16, float16, float32 };

// Columns of a packed panel in this build (two vectors).
int panel_width();

struct PackArgs {
  const void* rows;  // [count, k]
  void* packed;      // [panels, k, width] or [panels, ceil(k/2), 2 * width]
  long row_stride;
  int count, k, row_start;
};

void pack_rows(DType dtype, const PackArgs& args);

struct LinearArgs {
  const void* x;       // [tokens, k]
  const void* packed;  // panels of [n, k]
  const void* bias;    // [n], or null
  void* out;           // [tokens, n]
  long x_stride, out_stride;
  int tokens, n, k;
};

void packed_linear(DType dtype, const LinearArgs& args);

// What multiplies bfloat16 in this process; a row's bits are the same for any number of rows, but
// differ between the two. Set by girih_self_test (self_test.cpp), `vectors` before.
enum class Products { vectors, amx };
extern Products bf16_products;

// Whether this build has code for AMX tiles and this processor and its system let us run it.
bool amx_permitted();
void amx_linear(const LinearArgs& args);

struct AttentionArgs {
  const void *q, *k, *v;  // [tokens, heads, dim]: strides below, last one is 1
  void *key_cache, *value_cache;
  void* out;
  long q_token, q_head, k_token, k_head, v_token, v_head, out_token, out_head;
  const int32_t* query_start;  // [requests + 1]
  const int32_t* seq_lens;     // [requests]
  const int32_t* block_table;  // [requests, >= blocks of the context]
  long table_stride;
  const int64_t* slots;  // [tokens]
  int tokens, requests, heads, kv_heads, dim, dim_v, block_size;
  float scale, softcap;
  bool causal;
  int window;
  const float* sinks;  // [heads], or null
  bool quantised;      // the caches hold int8 and scales
};

void paged_attention(DType dtype, const AttentionArgs& args);

}  // namespace girih
