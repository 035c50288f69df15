// The ops of namespace `girih` on the CPU: checks the tensors, then calls the kernels.
//
// Only this file knows torch, and only its stable C++ interface: one library serves several torch
// versions, and compiling takes seconds. Schemas are defined in kernels/ops/schemas.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "kernels.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using girih::DType;

DType kernel_dtype(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16: return DType::bfloat16;
    case ScalarType::Half: return DType::float16;
    case ScalarType::Float: return DType::float32;
    default: break;
  }
  STD_TORCH_CHECK(false, name, " must be bfloat16, float16 or float32");
}

void check_dtype(const Tensor& t, ScalarType dtype, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " has an unexpected dtype (see girih.kernels.ops.schemas)");
}

void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  auto sizes = t.sizes();
  bool same = sizes.size() == shape.size();
  size_t i = 0;
  for (int64_t size : shape) same = same && sizes[i++] == size;
  if (same) return;
  std::string seen, wanted;
  for (int64_t size : sizes) seen += std::to_string(size) + " ";
  for (int64_t size : shape) wanted += std::to_string(size) + " ";
  STD_TORCH_CHECK(false, name, " has shape [ ", seen, "], expected [ ", wanted, "]");
}

// The last dimension must be dense; a row of one element has no stride that matters.
void check_dense(const Tensor& t, const char* name) {
  int64_t last = t.dim() - 1;
  STD_TORCH_CHECK(t.stride(last) == 1 || t.size(last) <= 1, name,
                  ": elements of the last dimension must be adjacent; call .contiguous()");
}

// x itself, or a copy whose rows are dense: which layout a tile's operations give their results is
// not known before they are compiled.
Tensor with_dense_rows(const Tensor& x) {
  int64_t last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) <= 1 ? x : torch::stable::contiguous(x);
}

void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

void pack_linear(Tensor packed, Tensor rows, int64_t row_start) {
  DType dtype = kernel_dtype(packed, "packed");
  check_dtype(rows, packed.scalar_type(), "weight_rows");
  STD_TORCH_CHECK(rows.dim() == 2, "weight_rows must be [n, K]");
  check_dense(rows, "weight_rows");
  check_contiguous(packed, "packed");
  int64_t count = rows.size(0), k = rows.size(1), width = girih::panel_width();
  int64_t capacity = packed.size(0) * width;
  STD_TORCH_CHECK(row_start >= 0 && row_start + count <= capacity, "rows [", row_start, ", ",
                  row_start + count, ") do not fit in a packed weight of ", capacity, " rows");
  if (dtype == DType::bfloat16)
    check_shape(packed, "packed", {packed.size(0), (k + 1) / 2, 2 * width});
  else
    check_shape(packed, "packed", {packed.size(0), k, width});
  girih::pack_rows(dtype, {rows.data_ptr(), packed.data_ptr(), rows.stride(0), (int)count, (int)k,
                           (int)row_start});
}

Tensor new_output(const Tensor& like, int64_t rows, int64_t columns) {
  int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(2, sizes, strides, dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor packed_linear(Tensor x, Tensor packed, std::optional<Tensor> bias, int64_t n) {
  DType dtype = kernel_dtype(x, "x");
  check_dtype(packed, x.scalar_type(), "packed");
  STD_TORCH_CHECK(x.dim() == 2, "x must be [T, K]");
  x = with_dense_rows(x);
  check_contiguous(packed, "packed");
  int64_t tokens = x.size(0), k = x.size(1), width = girih::panel_width();
  STD_TORCH_CHECK(n >= 1, "n is ", n, "; it must be at least 1");
  int64_t panels = (n + width - 1) / width;
  if (dtype == DType::bfloat16)
    check_shape(packed, "packed", {panels, (k + 1) / 2, 2 * width});
  else
    check_shape(packed, "packed", {panels, k, width});
  if (bias) {
    check_dtype(*bias, x.scalar_type(), "bias");
    check_shape(*bias, "bias", {n});
    check_contiguous(*bias, "bias");
  }
  Tensor out = new_output(x, tokens, n);
  if (tokens > 0)
    girih::packed_linear(dtype, {x.data_ptr(), packed.data_ptr(), bias ? bias->data_ptr() : nullptr,
                                 out.data_ptr(), x.stride(0), n, (int)tokens, (int)n, (int)k});
  return out;
}

// Values that would make the kernel read or write outside its tensors.
void check_batch(const girih::AttentionArgs& a, int64_t num_blocks, int64_t table_blocks) {
  STD_TORCH_CHECK(a.query_start[0] == 0 && a.query_start[a.requests] <= a.tokens,
                  "query_start must begin with 0 and end at ", a.tokens, " tokens at most");
  for (int r = 0; r < a.requests; ++r) {
    int queries = a.query_start[r + 1] - a.query_start[r];
    STD_TORCH_CHECK(queries >= 0 && queries <= a.seq_lens[r], "request ", r, " has ", queries,
                    " new tokens in a context of ", a.seq_lens[r]);
    if (queries == 0) continue;
    int64_t used = (a.seq_lens[r] + a.block_size - 1) / a.block_size;
    STD_TORCH_CHECK(used <= table_blocks, "request ", r, " needs ", used,
                    " blocks, its table has ", table_blocks);
    const int32_t* table = a.block_table + r * a.table_stride;
    for (int64_t b = 0; b < used; ++b)
      STD_TORCH_CHECK(table[b] >= 0 && table[b] < num_blocks, "request ", r, " names block ",
                      table[b], " of ", num_blocks);
  }
  for (int t = 0; t < a.tokens; ++t)
    STD_TORCH_CHECK(a.slots[t] < num_blocks * a.block_size, "token ", t, " has slot ", a.slots[t],
                    "; the cache has ", num_blocks * a.block_size);
}

void check_caches(const Tensor& keys, const Tensor& values, const girih::AttentionArgs& a,
                  bool pairs) {
  int64_t blocks = keys.size(0), size = a.block_size;
  check_contiguous(keys, "key_cache");
  check_contiguous(values, "value_cache");
  STD_TORCH_CHECK(size >= 16 && size % 16 == 0, "block size ", size, " is not a multiple of 16");
  if (a.quantised) {
    STD_TORCH_CHECK(a.dim <= 512 && a.dim_v <= 512, "int8 caches have heads of 512 at most");
    check_shape(keys, "key_cache", {blocks, a.kv_heads, a.dim + 4, size});
    check_shape(values, "value_cache", {blocks, a.kv_heads, a.dim_v + 4, size});
  } else if (pairs) {
    check_shape(keys, "key_cache", {blocks, a.kv_heads, a.dim / 2, size, 2});
    check_shape(values, "value_cache", {blocks, a.kv_heads, size / 2, a.dim_v, 2});
  } else {
    check_shape(keys, "key_cache", {blocks, a.kv_heads, a.dim, size});
    check_shape(values, "value_cache", {blocks, a.kv_heads, size, a.dim_v});
  }
}

std::vector<float> widen_sinks(const std::optional<Tensor>& sinks, int64_t heads) {
  if (!sinks) return {};
  check_shape(*sinks, "sinks", {heads});
  check_contiguous(*sinks, "sinks");
  std::vector<float> wide(heads);
  for (int64_t h = 0; h < heads; ++h) {
    if (sinks->scalar_type() == ScalarType::Float)
      wide[h] = ((const float*)sinks->data_ptr())[h];
    else if (sinks->scalar_type() == ScalarType::BFloat16)
      wide[h] = ((const torch::headeronly::BFloat16*)sinks->data_ptr())[h];
    else
      wide[h] = ((const torch::headeronly::Half*)sinks->data_ptr())[h];
  }
  return wide;
}

void paged_attention(Tensor q, Tensor k, Tensor v, Tensor key_cache, Tensor value_cache,
                     Tensor query_start, Tensor seq_lens, Tensor block_table, Tensor slot_mapping,
                     double scale, bool causal, int64_t window, double softcap,
                     std::optional<Tensor> sinks, Tensor out) {
  DType dtype = kernel_dtype(q, "q");
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3, "q, k and v must be [T, heads, D]");
  int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2);
  int64_t kv_heads = k.size(1), dim_v = v.size(2), requests = seq_lens.size(0);
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, heads, " heads are not a multiple of ",
                  kv_heads, " kv heads");
  STD_TORCH_CHECK(dim % 8 == 0 && dim_v % 8 == 0 && dim >= 8 && dim_v >= 8, "head sizes ", dim,
                  " and ", dim_v, " must be positive multiples of 8");
  check_shape(k, "k", {tokens, kv_heads, dim});
  check_shape(v, "v", {tokens, kv_heads, dim_v});
  check_shape(out, "out", {tokens, heads, dim_v});
  const bool quantised = key_cache.scalar_type() == ScalarType::Char;
  const ScalarType cached = quantised ? ScalarType::Char : q.scalar_type();
  check_dtype(k, q.scalar_type(), "k");
  check_dtype(v, q.scalar_type(), "v");
  check_dtype(out, q.scalar_type(), "out");
  check_dtype(key_cache, cached, "key_cache");
  check_dtype(value_cache, cached, "value_cache");
  check_dense(q, "q");
  check_dense(k, "k");
  check_dense(v, "v");
  check_dense(out, "out");
  check_dtype(query_start, ScalarType::Int, "query_start");
  check_dtype(seq_lens, ScalarType::Int, "seq_lens");
  check_dtype(block_table, ScalarType::Int, "block_table");
  check_dtype(slot_mapping, ScalarType::Long, "slot_mapping");
  check_shape(query_start, "query_start", {requests + 1});
  check_shape(slot_mapping, "slot_mapping", {tokens});
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == requests,
                  "block_table must have one row per request");
  check_dense(query_start, "query_start");
  check_dense(seq_lens, "seq_lens");
  check_dense(block_table, "block_table");
  check_dense(slot_mapping, "slot_mapping");
  STD_TORCH_CHECK(window >= 0 && softcap >= 0, "window and softcap must not be negative");
  std::vector<float> wide_sinks = widen_sinks(sinks, heads);
  girih::AttentionArgs args{
      q.data_ptr(), k.data_ptr(), v.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(),
      out.data_ptr(), q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
      out.stride(0), out.stride(1), (const int32_t*)query_start.data_ptr(),
      (const int32_t*)seq_lens.data_ptr(), (const int32_t*)block_table.data_ptr(),
      block_table.stride(0), (const int64_t*)slot_mapping.data_ptr(), (int)tokens, (int)requests,
      (int)heads, (int)kv_heads, (int)dim, (int)dim_v, (int)key_cache.size(3), (float)scale,
      (float)softcap, causal, (int)window, wide_sinks.empty() ? nullptr : wide_sinks.data(), quantised};
  check_caches(key_cache, value_cache, args, dtype == DType::bfloat16);
  check_batch(args, key_cache.size(0), block_table.size(1));
  if (tokens > 0) girih::paged_attention(dtype, args);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(girih, CPU, m) {
  m.impl("pack_linear_", TORCH_BOX(&pack_linear));
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
}
