"""The same networks as plain tensor code: what they compute for one frame, without masks, caches
and complex numbers, so that torch.compile makes few large kernels of it.

Every function reads the parameters of the stock module it is given; `training/check_fast.py`
compares each with that module's own forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- VAE, as two-dimensional convolutions [n, c, h, w] ---


class FrameConv(nn.Module):
    """The slice of a causal 3-D convolution that acts on the first frame."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        self.weight = nn.Parameter(conv.weight[:, :, -1].detach().clone())
        self.bias = nn.Parameter(conv.bias.detach().clone())  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=self.weight.shape[-1] // 2)


def flatten_vae(vae: Any) -> None:
    """Replace the 3-D convolutions of a stock VAE by trainable 2-D ones, in place."""
    for module in list(vae.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Conv3d):
                setattr(module, name, FrameConv(child))


def unflatten_state(flat: dict[str, Tensor], stock: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights for the stock VAE: the 2-D kernels as last slices, zeros before them."""
    state = {}
    for name, like in stock.items():
        value = flat[name]
        if value.ndim == 4 and like.ndim == 5:
            value = F.pad(value.unsqueeze(2), (0, 0, 0, 0, like.shape[2] - 1, 0))
        state[name] = value.reshape(like.shape)
    return state


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    scale = norm.gamma.view(1, -1, 1, 1) * norm.scale
    normal: Tensor = F.normalize(x.float(), dim=1) * scale
    return normal.to(x.dtype)


def _residual(block: Any, x: Tensor) -> Tensor:
    h = block.conv1(F.silu(_rms_norm(block.norm1, x)))
    h = block.conv2(F.silu(_rms_norm(block.norm2, h)))
    return block.conv_shortcut(x) + h  # type: ignore[no-any-return]


def _attention(block: Any, x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    qkv = block.to_qkv(_rms_norm(block.norm, x)).reshape(n, 1, 3 * c, h * w).transpose(2, 3)
    q, k, v = qkv.chunk(3, dim=-1)
    out = F.scaled_dot_product_attention(q, k, v)
    return x + block.proj(out.squeeze(1).transpose(1, 2).reshape(n, c, h, w))  # type: ignore[no-any-return]


def _middle(block: Any, x: Tensor) -> Tensor:
    x = _residual(block.resnets[0], x)
    return _residual(block.resnets[1], _attention(block.attentions[0], x))


def encode(vae: Any, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 3, H, W] to mean and log variance [n, 16, H/8, W/8] of the latents."""
    encoder = vae.encoder
    x = encoder.conv_in(pictures)
    for block in encoder.down_blocks:
        is_resample = hasattr(block, "resample")
        x = block.resample(x) if is_resample else _residual(block, x)
    x = _middle(encoder.mid_block, x)
    x = encoder.conv_out(F.silu(_rms_norm(encoder.norm_out, x)))
    mean, log_variance = vae.quant_conv(x).chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode(vae: Any, latents: Tensor) -> Tensor:
    """[n, 16, h, w] raw latents to pictures [n, 3, 8h, 8w]."""
    decoder = vae.decoder
    x = _middle(decoder.mid_block, decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        for resnet in block.resnets:
            x = _residual(resnet, x)
        if block.upsamplers is not None:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest-exact")
            x = block.upsamplers[0].resample[1](x)
    return decoder.conv_out(F.silu(_rms_norm(decoder.norm_out, x)))  # type: ignore[no-any-return]


# --- transformer ---

Rope = tuple[Tensor, Tensor]  # cosine and sine, each [tokens, half a head]


def dit_rope(model: Any, height: int, width: int, num_text: int) -> tuple[Rope, Rope]:
    """For a picture of height x width tokens and for its text."""
    device = model.proj_out.weight.device
    image, text = model.pos_embed([(1, height, width)], device=device, max_txt_seq_len=num_text)
    return (image.real.clone(), image.imag.clone()), (text.real.clone(), text.imag.clone())


def _rotate_pairs(x: Tensor, rope: Rope) -> Tensor:
    """x [n, tokens, heads, head]: neighbouring channels are a complex number."""
    cos, sin = (part[None, :, None] for part in rope)
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def _head_norm(norm: Any, x: Tensor) -> Tensor:
    x = x.float()
    normal: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight
    return normal


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    x = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q, k, v [n, heads, tokens, head]; `mask` [n, 1, tokens, 1] is added to every key's scores.

    The mask travels as one more channel of the keys, which every query multiplies by one: so the
    attention kernels without masks, the fast ones, can be used. Heads grow by 8 for alignment.
    """
    scale = q.shape[-1] ** -0.5
    q = torch.cat([q, torch.ones_like(q[..., :8])], dim=-1)
    k = torch.cat([k, (mask / 8 / scale).to(k.dtype).expand(-1, k.shape[1], -1, 8)], dim=-1)
    out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, 8)), scale=scale)
    return out[..., :-8]


def dit_block(
    block: Any, image: Tensor, text: Tensor, time: Tensor, ropes: tuple[Rope, Rope], mask: Tensor
) -> tuple[Tensor, Tensor]:
    """image [n, s, d], text [n, t, d], time [n, d], mask as in `attend`."""
    attn = block.attn
    image_mod = block.img_mod[1](time).float().chunk(6, dim=-1)
    text_mod = block.txt_mod[1](time).float().chunk(6, dim=-1)
    xi = _modulated(image, image_mod[0], image_mod[1])
    xt = _modulated(text, text_mod[0], text_mod[1])

    heads = (attn.heads, -1)
    qi, ki, vi = (f(xi).unflatten(-1, heads) for f in (attn.to_q, attn.to_k, attn.to_v))
    qt, kt, vt = (
        f(xt).unflatten(-1, heads) for f in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    )
    qi = _rotate_pairs(_head_norm(attn.norm_q, qi), ropes[0]).to(vi.dtype)
    ki = _rotate_pairs(_head_norm(attn.norm_k, ki), ropes[0]).to(vi.dtype)
    qt = _rotate_pairs(_head_norm(attn.norm_added_q, qt), ropes[1]).to(vi.dtype)
    kt = _rotate_pairs(_head_norm(attn.norm_added_k, kt), ropes[1]).to(vi.dtype)
    q, k, v = (torch.cat(pair, dim=1).transpose(1, 2) for pair in ((qt, qi), (kt, ki), (vt, vi)))
    out = attend(q, k, v, mask).transpose(1, 2).flatten(2)
    num_text = text.shape[1]

    image = image + image_mod[2].unsqueeze(1) * attn.to_out[0](out[:, num_text:])
    text = text + text_mod[2].unsqueeze(1) * attn.to_add_out(out[:, :num_text])
    image = image + image_mod[5].unsqueeze(1) * block.img_mlp(
        _modulated(image, image_mod[3], image_mod[4])
    )
    text = text + text_mod[5].unsqueeze(1) * block.txt_mlp(
        _modulated(text, text_mod[3], text_mod[4])
    )
    return image, text


class FastTransformer:
    """The velocity of noisy latents; one compiled function serves all blocks and sizes."""

    def __init__(self, model: Any, is_compiled: bool) -> None:
        self.model = model
        self.block = torch.compile(dit_block, dynamic=True) if is_compiled else dit_block
        self._ropes: dict[tuple[int, int, int], tuple[Rope, Rope]] = {}

    def __call__(
        self, latents: Tensor, text: Tensor, num_text: Tensor, sigma: Tensor, grid: tuple[int, int]
    ) -> Tensor:
        """latents [n, s, 64], text [n, t, hidden], num_text [n] valid ones, sigma [n]."""
        model = self.model
        key = (*grid, text.shape[1])
        if key not in self._ropes:
            self._ropes[key] = dit_rope(model, *key)
        positions = torch.arange(text.shape[1] + latents.shape[1], device=text.device)
        is_padding = (positions >= num_text[:, None]) & (positions < text.shape[1])
        mask = is_padding[:, None, :, None] * -1e4

        image = model.img_in(latents).float()
        hidden = model.txt_in(model.txt_norm(text.float())).float()
        time = F.silu(model.time_text_embed(sigma, image))
        for block in model.transformer_blocks:
            image, hidden = self.block(block, image, hidden, time, self._ropes[key], mask)
        scale, shift = model.norm_out.linear(time).float().chunk(2, dim=-1)
        return model.proj_out(_modulated(image, shift, scale)).float()  # type: ignore[no-any-return]


# --- language model ---


def mrope(model: Any, positions: Tensor) -> Rope:
    """positions [3, n, tokens] to cosine and sine [n, tokens, head]."""
    text = model.model.language_model
    parts = text.rotary_emb.inv_freq.float()[None, None, None] * positions[..., None].float()
    sections = model.config.text_config.rope_parameters["mrope_section"]
    chosen = [part[axis] for axis, part in enumerate(parts.split(sections, dim=-1))]
    angles = torch.cat(chosen, dim=-1).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, tokens, head] or anything cos and sin broadcast to."""
    first, second = x.float().chunk(2, dim=-1)
    return x.float() * cos + torch.cat([-second, first], dim=-1) * sin


def _llm_norm(norm: Any, x: Tensor) -> Tensor:
    x = x.float()
    variance = x.square().mean(-1, keepdim=True)
    normal: Tensor = x * torch.rsqrt(variance + norm.variance_epsilon) * norm.weight
    return normal


def _swiglu(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))  # type: ignore[no-any-return]


def text_layer(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attn = layer.self_attn
    h = _llm_norm(layer.input_layernorm, x)
    q, k, v = (
        f(h).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
        for f in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    q = _rotate_halves(q, cos, sin).to(v.dtype)
    k = _rotate_halves(k, cos, sin).to(v.dtype)
    repeats = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + attn.o_proj(out.transpose(1, 2).flatten(2)).float()
    return x + _swiglu(layer.mlp, _llm_norm(layer.post_attention_layernorm, x)).float()


def vision_block(block: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attn = block.attn
    qkv = attn.qkv(_llm_norm(block.norm1, x)).unflatten(-1, (3, attn.num_heads, -1))
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    q, k = (_rotate_halves(part, cos, sin).to(v.dtype) for part in (q, k))
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + attn.proj(out).float()
    return x + _swiglu(block.mlp, _llm_norm(block.norm2, x)).float()


class FastLanguageModel:
    """Hidden states, logits and picture embeddings of a Qwen2.5-VL."""

    def __init__(self, model: Any, is_compiled: bool) -> None:
        self.model = model
        self.text_layer: Any = (
            torch.compile(text_layer, dynamic=True) if is_compiled else text_layer
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.model.model.language_model.embed_tokens(token_ids)  # type: ignore[no-any-return]

    def hidden(self, embeddings: Tensor, positions: Tensor | None = None) -> Tensor:
        """[n, tokens, hidden] after the last norm; positions [3, n, tokens] for pictures."""
        if positions is None:
            steps = torch.arange(embeddings.shape[1], device=embeddings.device)
            positions = steps.expand(3, 1, -1)
        cos, sin = (part.unsqueeze(1) for part in mrope(self.model, positions))
        x = embeddings.float()
        text = self.model.model.language_model
        for layer in text.layers:
            x = self.text_layer(layer, x, cos, sin)
        return _llm_norm(text.norm, x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden).float()  # type: ignore[no-any-return]

    def see(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """patches [n, h * w, 3 * 2 * 14 * 14] in merge order to [n, h * w / 4, hidden]."""
        visual = self.model.model.visual
        x = F.linear(patches, visual.patch_embed.proj.weight.flatten(1)).float()
        rows, columns = merge_order(*grid, device=patches.device)
        frequencies = visual.rotary_pos_emb.inv_freq.float()
        angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], dim=-1)
        angles = angles.repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        for block in visual.blocks:
            x = vision_block(block, x, cos, sin)
        merged = _llm_norm(visual.merger.ln_q, x).unflatten(1, (-1, 4)).flatten(2)
        return visual.merger.mlp(merged).float()  # type: ignore[no-any-return]


def merge_order(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[h * w] row and column of each patch, the four of one token in succession."""
    rows = torch.arange(height, device=device)[:, None].expand(height, width)
    columns = torch.arange(width, device=device)[None].expand(height, width)
    return tuple(  # type: ignore[return-value]
        axis.reshape(height // 2, 2, width // 2, 2).transpose(1, 2).flatten()
        for axis in (rows, columns)
    )
