"""A package `aiter` with the functions and parameters of a real version, and small bodies in PyTorch.

The bodies are strict about what AITER's kernels take for granted, so that a wrong view, dtype
or missing scale fails instead of giving numbers. Attention writes a row for each sequence where all decode, and leaves
rows of padding alone, as AITER's does.
"""

from __future__ import annotations

from pathlib import Path

from kernels.aiter.signatures import Signatures

_COMMON = '''
import contextlib
import enum
import types

import torch

ActivationType = enum.IntEnum("ActivationType", {"Silu": 0, "Gelu": 1})
QuantType = enum.IntEnum("QuantType", {"No": 0, "per_Token": 2, "per_128x128": 5})
GateMode = enum.Enum("GateMode", {"SEPARATED": "separated"})
dtypes = types.SimpleNamespace(bf16=torch.bfloat16, fp32=torch.float32, i8=torch.int8)


# One for each `graph_capture` that is held.
capturing = []


def rms(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def blocks(x):
    """[..., rows / 16, 16, columns / 32, 16-byte pieces of 32 columns, numbers of a piece]"""
    piece = 16 // x.element_size()
    return (*x.shape[:-2], x.shape[-2] // 16, 16, x.shape[-1] // 32, 32 // piece, piece)


def unshuffled(x):
    assert x.is_shuffled
    rows, within, columns, pieces, piece = blocks(x)[-5:]
    tiles = x.reshape(-1, rows, columns, pieces, within, piece)
    return tiles.permute(0, 1, 4, 2, 3, 5).reshape(x.shape)


def by_blocks(weight, scale):
    """[..., N, K] times a scale [..., N / 128, K / 128] of each block"""
    rows, columns = (-(-size // 128) for size in weight.shape[-2:])
    assert scale.shape == (*weight.shape[:-2], rows, columns) and scale.dtype == torch.float32 and scale.is_contiguous()
    wide = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight.float() * wide[..., : weight.shape[-2], : weight.shape[-1]]


def rounded(x, dtype, group):
    """A row as numbers of an FP8 times a scale for each `group` of them"""
    groups = x.float().view(-1, group)
    scales = (groups.abs().amax(-1, keepdim=True) / torch.finfo(dtype).max).clamp(min=1e-10)
    return ((groups / scales).to(dtype).float() * scales).view(x.shape)


def attend(q, keys, values, scale, positions, window=None, sinks=None):
    """One sequence: q [rows, Hq, D], keys and values [n, Hkv, ...]"""
    group = q.shape[1] // keys.shape[1]
    k, v = (each.float().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("thd,nhd->htn", q.float(), k) * scale
    places = torch.arange(len(k))
    hidden = places > positions[:, None]
    if window is not None:
        hidden |= places <= positions[:, None] - window
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1)[..., : len(k)], v)


def attend_all(q, keys, values, out, starts, all_decode, lengths, tables, scale, window=None, sinks=None):
    """keys, values [blocks, size, Hkv, ...]"""
    assert all(each.dtype == torch.int32 for each in (starts, lengths, tables))
    for s, length in enumerate(lengths.tolist()):
        first, last = starts[s].item(), starts[s].item() + 1 if all_decode else starts[s + 1].item()
        if all_decode and not length:
            out[first] = 0.0
            assert first < len(out), "writes behind the end"
            continue
        ids = tables[s].long()
        k, v = (each[ids].flatten(0, 1)[:length] for each in (keys, values))
        positions = torch.arange(length - (last - first), length)
        out[first:last] = attend(q[first:last], k, v, scale, positions, window, sinks).to(out.dtype)
'''

_BODIES = {
    "aiter.ops.rmsnorm:rmsnorm2d_fwd": """
    assert input.dim() == 2 and input.is_contiguous() and weight.dtype == input.dtype
    return rms(input, weight, epsilon)""",
    "aiter.ops.rmsnorm:rmsnorm2d_fwd_with_add": """
    assert input.dim() == 2 and all(each.is_contiguous() for each in (out, input, residual_in, residual_out))
    residual_out.copy_(input + residual_in)
    out.copy_(rms(residual_out, weight, epsilon))""",
    "aiter.ops.norm:layernorm2d_fwd": """
    assert input.dim() == 2 and input.is_contiguous() and weight.dtype == bias.dtype == input.dtype
    wide = torch.nn.functional.layer_norm(input.double(), weight.shape, weight.double(), bias.double(), epsilon)
    return wide.to(input.dtype)""",
    "aiter.ops.rope:rope_cached_2c_fwd": """
    assert rotate_style == 0 and reuse_freqs_front_part and not nope_first and not transpose_output
    assert input_x.shape[:2] == input_y.shape[:2] and input_x.stride(3) == input_y.stride(3) == 1
    assert cos.shape == sin.shape == (input_x.shape[0], 1, 1, cos.shape[-1])

    def rotated(x):
        half = cos.shape[-1]
        a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), -1)

    return rotated(input_x), rotated(input_y)""",
    "aiter.ops.activation:silu_and_mul": """
    assert input.is_contiguous() and out.shape[-1] * 2 == input.shape[-1]
    gate, up = input.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)""",
    "aiter.ops.moe_op:topk_softmax": """
    assert topk_weights.dtype == torch.float32
    assert topk_indices.dtype == token_expert_indices.dtype == torch.int32
    best, ids = gating_output.float().softmax(-1).topk(topk_weights.shape[1])
    topk_weights.copy_(best / best.sum(-1, keepdim=True) if need_renorm else best)
    topk_indices.copy_(ids)""",
    "aiter.ops.topk:biased_grouped_topk": """
    assert need_renorm and num_expert_group in (1, 2, 4, 8)
    assert correction_bias.dtype == gating_output.dtype and topk_ids.dtype == torch.int32
    scores = gating_output.float().sigmoid()
    groups = (scores + correction_bias).unflatten(1, (num_expert_group, -1))
    kept = groups.topk(2).values.sum(-1).topk(topk_group).indices
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
    ids = groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1).topk(topk_ids.shape[1]).indices
    chosen = scores.gather(1, ids)
    topk_weights.copy_(chosen / chosen.sum(-1, keepdim=True) * routed_scaling_factor)
    topk_ids.copy_(ids)""",
    "aiter.tuned_gemm:gemm_a16w16": """
    assert A.dim() == 2 and not hasattr(B, "is_shuffled") and scale_a is scale_b is scale_c is None
    return torch.nn.functional.linear(A.float(), B.float(), None if bias is None else bias.float()).to(otype)""",
    "aiter.ops.shuffle:shuffle_weight": """
    assert layout == (16, 16) and not use_int4 and x.shape[-2] % 16 == 0 and x.shape[-1] % 32 == 0
    tiles = x.reshape(-1, *blocks(x)[-5:]).permute(0, 1, 3, 4, 2, 5)
    out = tiles.contiguous().view(x.shape)
    out.is_shuffled = True
    return out""",
    "aiter.ops.quant:per_token_quant_hip": """
    assert scale is None and x.is_contiguous()
    scales = (x.float().abs().amax(-1, keepdim=True) / torch.finfo(quant_dtype).max).clamp(min=1e-10)
    return (x.float() / scales).to(quant_dtype), scales""",
    "aiter.ops.quant:per_group_quant_hip": """
    assert scale is None and x.is_contiguous() and not transpose_scale and x.dtype in (torch.bfloat16, torch.float16)
    groups = x.float().view(len(x), -1, group_size)
    scales = (groups.abs().amax(-1) / torch.finfo(quant_dtype).max).clamp(min=1e-10)
    return (groups / scales.unsqueeze(-1)).to(quant_dtype).view(x.shape), scales""",
    "aiter.ops.gemm_op_a8w8:gemm_a8w8_blockscale": """
    assert not isBpreshuffled and not hasattr(WQ, "is_shuffled") and dtype in (torch.bfloat16, torch.float16)
    assert XQ.dtype == WQ.dtype and WQ.element_size() == 1 and WQ.shape[0] % 8 == 0 and WQ.shape[1] % 128 == 0
    assert x_scale.shape == (len(XQ), XQ.shape[1] // 128) and x_scale.is_contiguous()
    inputs = XQ.float() * x_scale.repeat_interleave(128, 1)
    return (inputs @ by_blocks(WQ, w_scale).t()).to(dtype)""",
    "aiter.ops.gemm_op_a8w8:gemm_a8w8_bpreshuffle": """
    assert bias is None and x_scale.shape == (len(XQ), 1) and w_scale.shape == (len(WQ), 1)
    assert XQ.dtype == WQ.dtype and x_scale.dtype == w_scale.dtype == torch.float32
    return ((XQ.float() * x_scale) @ (unshuffled(WQ).float() * w_scale).t()).to(dtype)""",
    "aiter.fused_moe:fused_moe": """
    assert topk_ids.dtype == torch.int32 and topk_weight.dtype == torch.float32 and hidden_states.is_contiguous()
    assert activation is ActivationType.Silu and (quant_type is QuantType.No) == (w1_scale is None)
    assert expert_mask is None or not expert_mask[topk_ids[:, -1].long()].any()
    up_weights, down_weights = unshuffled(w1).float(), unshuffled(w2).float()
    if quant_type is QuantType.per_128x128:
        assert hidden_states.dtype == torch.bfloat16 and not (w2.shape[1] % 128 or w2.shape[2] % 128)
        assert w1.dtype == w2.dtype and w1.element_size() == 1
        up_weights, down_weights = by_blocks(up_weights, w1_scale), by_blocks(down_weights, w2_scale)
    elif w1_scale is not None:
        assert w1_scale.shape == (*w1.shape[:2], 1) and w2_scale.shape == (*w2.shape[:2], 1)
        up_weights, down_weights = up_weights * w1_scale, down_weights * w2_scale
    def as_input(x):
        return x.float() if w1_scale is None else rounded(
            x, w1.dtype, 128 if quant_type is QuantType.per_128x128 else len(x))

    out = torch.zeros(hidden_states.shape)
    for row, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weight.tolist())):
        for expert, weight in zip(ids, weights):
            if expert_mask is not None and not expert_mask[expert]:
                continue
            gate, up = (up_weights[expert] @ as_input(hidden_states[row])).chunk(2)
            out[row] += weight * (down_weights[expert] @ as_input(torch.nn.functional.silu(gate) * up))
    return out.to(hidden_states.dtype)""",
    "aiter.ops.triton.fusions.fused_kv_cache:fused_qk_rope_reshape_and_cache": """
    rows, heads, width = q.shape
    assert is_neox and flash_layout and not apply_scale and not output_zeros and offs is None
    assert len(k) == len(v) == len(slot_mapping) == rows and k.shape == v.shape and heads % k.shape[1] == 0
    assert key_cache.shape == value_cache.shape and key_cache.shape[2:] == k.shape[1:] and k.shape[2] == width
    assert key_cache.dtype == value_cache.dtype == torch.bfloat16 and not width & (width - 1)
    assert not key_cache.shape[1] & (key_cache.shape[1] - 1) and cos.shape[-1] * 2 == width and cos.dim() == 2
    assert pos.dtype == torch.int64 and pos.max() < len(cos) and k_scale.dtype == v_scale.dtype == torch.float32
    own_cos, own_sin = cos[pos, None], sin[pos, None]

    def rotated(x):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * own_cos - b * own_sin, b * own_cos + a * own_sin), -1).to(x.dtype)

    kept, slots = slot_mapping >= 0, slot_mapping[slot_mapping >= 0].long()
    for source, cache in ((rotated(k), key_cache), (v, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots] = source[kept]
    return rotated(q), torch.empty_like(k), key_cache, value_cache""",
    "aiter.ops.triton.attention.unified_attention:unified_attention": """
    assert causal and window_size[1] == (0 if window_size[0] >= 0 else -1) and softcap == 0.0 and q_descale is None
    for each in (k_descale, v_descale):
        assert (each is not None) == (k.element_size() == 1)
    window = window_size[0] + 1 if window_size[0] >= 0 else None
    attend_all(q, k.float(), v.float(), out, cu_seqlens_q, max_seqlen_q == 1, seqused_k, block_table,
               softmax_scale, window, sinks)
    assert max_seqlen_k >= seqused_k.max()
    return out""",
    "aiter.ops.triton.attention.mla:mla_decode_fwd": """
    assert causal and len(q) == len(seqused_k) and kv_buffer.shape[2] == 1 and q_descale is None
    assert kv_lora_rank + qk_rope_head_dim == kv_buffer.shape[3] and out.shape[2] == kv_lora_rank
    wide = kv_buffer.float()
    attend_all(q, wide, wide[..., :kv_lora_rank], out, cu_seqlens_q, True, seqused_k, block_tables, softmax_scale)
    return out""",
    "aiter.ops.triton.attention.mla:mla_prefill_fwd": """
    assert causal and kv_buffer.shape[2] == 1 and q_descale is None
    assert kv_lora_rank + qk_rope_head_dim == kv_buffer.shape[3] and out.shape[2] == kv_lora_rank
    wide = kv_buffer.float()
    attend_all(q, wide, wide[..., :kv_lora_rank], out, cu_seqlens_q, False, seqused_k, block_tables, softmax_scale)
    return out""",
    "aiter.ops.communication:init_dist_env": """
    if not torch.distributed.is_initialized():
        raise AssertionError("AITER would look for a port of its own, and set HIP_VISIBLE_DEVICES")
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, torch.distributed.TCPStore), "what AITER tells the ranks goes through it"
    assert torch.distributed.get_world_size() == tensor_model_parallel_size in (2, 4, 6, 8)
    assert torch.distributed.get_rank() == rankID == local_rank""",
    "aiter.ops.communication:destroy_dist_env": """
    torch.distributed.destroy_process_group()""",
    "aiter.dist.communication_op:tensor_model_parallel_all_reduce": """
    assert input_.is_contiguous() and input_.numel()
    if capturing:
        return torch.zeros_like(input_)
    out = input_.clone()
    torch.distributed.all_reduce(out)
    return out""",
    "aiter.dist.parallel_state:graph_capture": """
    capturing.append(True)
    try:
        yield
    finally:
        capturing.pop()
        # Addresses are told to all ranks.
        torch.distributed.barrier()""",
}


def lay(folder: Path, tag: str, changed: dict[str, str] | None = None, without: str = "") -> None:
    """Writes `aiter/` of a version into a folder.

    Args:
        folder: that sys.path will have.
        tag: of the version.
        changed: other parameters of functions.
        without: a function to leave out.
    """
    signatures = Signatures.load()
    texts: dict[Path, str] = {folder / "aiter/common.py": _COMMON}
    for function, body in _BODIES.items():
        parameters = (changed or {}).get(function, signatures.parameters(function, tag))
        if parameters is None or function == without:
            continue
        module, name = function.split(":")
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        texts.setdefault(path, "from aiter.common import *\n")
        decorator = "@contextlib.contextmanager\n" if "    yield" in body else ""
        texts[path] += f"\n\n{decorator}def {name}({parameters}):{body}\n"
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    (folder / "aiter/__init__.py").write_text("from aiter.common import *\n", "utf-8")
