// The functions that a recorded program may call; the files that define them include this, so that the compiler compares.
#pragma once

extern "C" {
long rk_embedding(const void* weight, long w_row_stride, int dtype, const long* ids, long vocab_size, float* out, long rows,
                  long size);
void rk_linear(const void* x, long x_row_stride, int x_dtype, const void* w, long w_row_stride, int w_dtype,
               const void* bias, void* out, long out_row_stride, int out_dtype, long T, long N, long K);
long rk_linear_rotary(const void* x, long x_row_stride, int dtype, const void* w, long w_row_stride, const void* bias,
                      void* out, long T, long N, long K, const long* positions, const float* cos_sin, long max_positions,
                      long head_dim, long rotated_columns);
void rk_linear_silu_and_mul(const void* x, long x_row_stride, int dtype, const void* w, long w_row_stride,
                            const void* bias, void* out, long T, long I, long K);
void rk_linear_int8(const void* x, long x_row_stride, int x_dtype, const void* values, const float* w_scales,
                    const void* bias, int bias_dtype, void* scratch, void* out, long out_row_stride, int out_dtype, long T,
                    long N, long K);
void rk_rms_norm(const void* x, long x_stride, int x_dtype, const void* weight, int w_dtype, float eps,
                 const float* residual, long residual_stride, void* out, int out_dtype, float* sum, long rows, long size);
long rk_rotary(void* q, long q_row, long q_heads, void* k, long k_row, long k_heads, int dtype, long head_dim,
               const long* positions, const float* cos_sin, long max_positions, float direction, long rows);
void rk_silu_and_mul(const void* x, long stride, int dtype, void* out, long rows, long size);
long rk_lora_shrink(const void* x, long x_row, int dtype, const void* a, const int* ids, float* out, long rows,
                    long rank, long size, long num_adapters);
long rk_lora_expand(const float* y, const void* b, int dtype, const int* ids, const float* scales, void* out,
                    long out_row, int out_dtype, long rows, long rank, long columns, long num_adapters);
long rk_write_kv(const void* k, long k_row, long k_head, const void* v, long v_row, long v_head, int dtype, int kv_dtype,
                 void* k_cache, void* v_cache, float* key_scales, float* value_scales, const long* slots, long num_slots,
                 long tokens, long heads, long head_dim);
void rk_paged_attention(const void* q, long q_row_stride, const void* k_cache, const void* v_cache,
                        const float* key_scales, const float* value_scales, int dtype, int kv_dtype,
                        const int* block_tables, long block_table_stride, const int* query_start, const int* seq_lens,
                        const int* last_places, long num_seqs, long num_q_heads, long num_kv_heads, long head_dim,
                        long block_size, float scale, long window, float soft_cap, void* out, float* lse);
}
