"""Compares the training forwards with the stock modules: `python -m training.check_fast`."""

from __future__ import annotations

from random import Random

import torch

from training import fast, models
from training.pictures import patchify, resize_for_vision
from training.render import Renderer, encode_scenes
from training.world import sample_scene
from vllm_omni.models.qwen_image.checkpoint import IMAGE_PROCESSOR_CONFIG


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    rng = Random(0)
    pictures = Renderer("cpu").draw(encode_scenes([sample_scene(rng) for _ in range(2)]), 96, 128)

    vae, flat = models.build_vae(), models.build_vae()
    fast.flatten_vae(flat)
    stock = vae.encode(pictures.unsqueeze(2)).latent_dist
    mean, log_variance = fast.encode(flat, pictures)
    report("VAE mean", mean, stock.mean.squeeze(2))
    report("VAE log variance", log_variance, stock.logvar.squeeze(2))
    report("VAE decode", fast.decode(flat, mean), vae.decode(stock.mean).sample.squeeze(2), 1.0)
    restored = fast.unflatten_state(flat.state_dict(), vae.state_dict())
    vae.load_state_dict(restored)
    report("VAE exported", vae.encode(pictures.unsqueeze(2)).latent_dist.mean.squeeze(2), mean)

    transformer = models.build_transformer()
    for parameter in transformer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    latents, text = torch.randn(2, 48, 64), torch.randn(2, 9, models.TEXT_HIDDEN)
    num_text, sigma = torch.tensor([9, 5]), torch.tensor([0.3, 0.8])
    ours = fast.FastTransformer(transformer, False)(latents, text, num_text, sigma, (6, 8))
    theirs = transformer(
        hidden_states=latents,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=torch.arange(9)[None] < num_text[:, None],
        timestep=sigma,
        img_shapes=[[(1, 6, 8)]] * 2,
    ).sample
    report("transformer", ours, theirs)

    tokenizer = models.build_tokenizer()
    model = models.build_text_encoder(tokenizer).eval()
    language = fast.FastLanguageModel(model, False)
    ids = tokenizer("a small red star above a large blue ring", return_tensors="pt").input_ids
    stock_text = model(input_ids=ids, output_hidden_states=True)
    hidden = language.hidden(language.embed(ids))
    report("text hidden states", hidden, stock_text.hidden_states[-1])
    report("text logits", language.logits(hidden), stock_text.logits)
    check_vision(tokenizer, model, language, pictures)


def check_vision(tokenizer: object, model: object, language: object, pictures: object) -> None:
    """The whole captioning input, against the stock image processor and model."""
    from transformers import Qwen2VLImageProcessor

    from training.data import embed_chats, make_chats

    assert isinstance(pictures, torch.Tensor) and isinstance(language, fast.FastLanguageModel)
    settings = {
        k: v for k, v in IMAGE_PROCESSOR_CONFIG.items() if not k.endswith(("type", "class"))
    }
    processor = Qwen2VLImageProcessor(**settings)
    resized, grid = resize_for_vision(pictures)
    levels = ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    theirs = processor(list(levels), return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [[1, *grid]] * 2
    patches = patchify(resized)
    difference = (patches.flatten(0, 1) - theirs["pixel_values"]).abs().mean()
    print(f"patches: mean difference {float(difference):.4f}")
    exact = theirs["pixel_values"].unflatten(0, (2, -1))

    chats = make_chats(tokenizer, grid, ["Describe the picture."] * 2, ["a red"] * 2)
    embeddings = embed_chats(language, chats, language.see(exact, grid))
    stock = model(  # type: ignore[operator]
        input_ids=chats.ids,
        attention_mask=torch.ones_like(chats.ids),
        mm_token_type_ids=(chats.ids == model.config.image_token_id).int(),  # type: ignore[attr-defined]
        pixel_values=theirs["pixel_values"],
        image_grid_thw=theirs["image_grid_thw"],
    )
    hidden = language.hidden(embeddings, chats.positions)
    report("captioning logits", language.logits(hidden), stock.logits)


def report(name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float | None = None) -> None:
    if limit is not None:
        ours, theirs = ours.clamp(-limit, limit), theirs.clamp(-limit, limit)
    error = float((ours - theirs).norm() / theirs.norm())
    print(f"{name}: relative error {error:.1e}")
    assert error < 1e-4, name


if __name__ == "__main__":
    main()
