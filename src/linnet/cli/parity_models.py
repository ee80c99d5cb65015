"""A small model of each family, with random weights and inputs, for `linnet parity`."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportPrivateUsage=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]
SEED = 0


def make(family: str, tiny: bool = False, implementation: str = "eager") -> Made:
    """A model of a family in evaluation mode, and inputs for it, the same at each call.

    Args:
        family: one of `MODELS`.
        tiny: as small as the architecture goes; else wide and long enough for times to mean much.
        implementation: transformers' own word for the attention that the model is built with.

    Raises:
        ImportError: transformers is missing, or has not the family's classes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model, inputs = MODELS[family](0 if tiny else 1, implementation)
    return model.eval(), inputs


def _pixels(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size)


def _build(kind: str, config: Any, implementation: str) -> nn.Module:
    import transformers

    config._attn_implementation = implementation
    return getattr(transformers, kind)(config)


def _plain(size: int, **more: Any) -> dict[str, Any]:
    """The words that configs of plain transformers share."""
    width = (32, 384)[size]
    return {
        "hidden_size": width,
        "num_hidden_layers": (2, 4)[size],
        "num_attention_heads": (4, 6)[size],
        "intermediate_size": 2 * width,
        **more,
    }


def _linnet(size: int, implementation: str) -> Made:
    from linnet.models.vision import Attention

    width = (32, 384)[size]
    layers = [Attention(width, (4, 6)[size], fused=False) for _ in range(2)]
    return nn.Sequential(*layers), {"input": torch.randn(2, (17, 577)[size], width)}


def _bert(size: int, implementation: str) -> Made:
    from transformers import BertConfig

    length = (9, 128)[size]
    config = BertConfig(**_plain(size), vocab_size=99, max_position_embeddings=length)
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length // 2 :] = 0
    ids = torch.randint(0, 99, (2, length))
    return _build("BertModel", config, implementation), {"input_ids": ids, "attention_mask": mask}


def _square(kind: str) -> Callable[[int, str], Made]:
    def made(size: int, implementation: str) -> Made:
        import transformers

        side, patch = (32, 224)[size], (8, 16)[size]
        config = getattr(transformers, f"{kind}Config")(
            **_plain(size), image_size=side, patch_size=patch
        )
        return _build(f"{kind}Model", config, implementation), {"pixel_values": _pixels(1, side)}

    return made


def _dinov2(size: int, implementation: str) -> Made:
    from transformers import DepthAnythingConfig, Dinov2Config

    side, patch, width = (28, 224)[size], 14, (32, 384)[size]
    plain = _plain(size, image_size=side, patch_size=patch)
    plain.pop("intermediate_size")
    layers = plain["num_hidden_layers"]
    stages = [f"stage{1 + index * layers // 4}" for index in range(4)]
    stages = stages if size else ["stage1", "stage2"]
    backbone = Dinov2Config(
        **plain, out_features=stages, reshape_hidden_states=False, apply_layernorm=True
    )
    backbone._attn_implementation = implementation
    config = DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=patch,
        reassemble_hidden_size=width,
        reassemble_factors=[4, 2, 1, 0.5][-len(stages) :] if size else [2, 1],
        neck_hidden_sizes=[16, 32, 48, 64][: len(stages)],
        fusion_hidden_size=16,
        head_hidden_size=8,
    )
    model = _build("DepthAnythingForDepthEstimation", config, implementation)
    return model, {"pixel_values": _pixels(1, side)}


def _segformer(size: int, implementation: str) -> Made:
    from transformers import SegformerConfig

    sizes = ([16, 32, 48, 64], [32, 64, 160, 256])[size]
    config = SegformerConfig(
        hidden_sizes=sizes, num_attention_heads=[1, 2, (3, 5)[size], (4, 8)[size]], depths=[1] * 4
    )
    model = _build("SegformerForSemanticSegmentation", config, implementation)
    return model, {"pixel_values": _pixels(1, (64, 256)[size])}


def _swin_config(size: int) -> Any:
    from transformers import SwinConfig

    return SwinConfig(
        image_size=(32, 224)[size],
        patch_size=(2, 4)[size],
        embed_dim=(16, 96)[size],
        depths=[2, 2],
        num_heads=([2, 4], [3, 6])[size],
        window_size=(4, 7)[size],
        out_features=["stage1", "stage2"],
    )


def _swin(size: int, implementation: str) -> Made:
    model = _build("SwinModel", _swin_config(size), implementation)
    return model, {"pixel_values": _pixels(2, (32, 224)[size])}


def _swin2sr(size: int, implementation: str) -> Made:
    from transformers import Swin2SRConfig

    side = (16, 64)[size]
    config = Swin2SRConfig(
        image_size=side,
        embed_dim=(16, 60)[size],
        depths=[2, 2],
        num_heads=([2, 2], [6, 6])[size],
        window_size=(4, 8)[size],
        upscale=2,
    )
    model = _build("Swin2SRForImageSuperResolution", config, implementation)
    return model, {"pixel_values": torch.rand(2, 3, side, side)}


def _two_towers(size: int, side: int) -> tuple[dict[str, Any], dict[str, Any]]:
    text = _plain(size, vocab_size=99, max_position_embeddings=16)
    return text, _plain(size, image_size=side, patch_size=(8, 16)[size])


def _owlv2(size: int, implementation: str) -> Made:
    from transformers import Owlv2Config

    side = (32, 384)[size]
    text, vision = _two_towers(size, side)
    config = Owlv2Config(text_config=text, vision_config=vision, projection_dim=text["hidden_size"])
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    inputs = {
        "pixel_values": _pixels(1, side),
        "input_ids": torch.randint(1, 99, (2, 16)),
        "attention_mask": mask,
    }
    return _build("Owlv2ForObjectDetection", config, implementation), inputs


def _siglip2(size: int, implementation: str) -> Made:
    from transformers import Siglip2Config

    patch, across = (4, 16)[size], (4, 16)[size]
    text = _plain(size, vocab_size=99, max_position_embeddings=16)
    text["projection_size"] = text["hidden_size"]
    vision = _plain(size, patch_size=patch, num_patches=across * across)
    places = across * across
    seen = torch.ones(2, places, dtype=torch.int64)
    seen[1, places // 2 :] = 0
    inputs = {
        "input_ids": torch.randint(1, 99, (2, 16)),
        "pixel_values": torch.randn(2, places, 3 * patch * patch),
        "pixel_attention_mask": seen,
        "spatial_shapes": torch.tensor([[across, across], [across // 2, across]]),
    }
    config = Siglip2Config(text_config=text, vision_config=vision)
    return _build("Siglip2Model", config, implementation), inputs


def _sam(size: int, implementation: str) -> Made:
    from transformers import SamConfig

    side, width = (64, 256)[size], (32, 192)[size]
    vision = _plain(
        size,
        image_size=side,
        patch_size=8 if size == 0 else 16,
        window_size=(3, 7)[size],
        global_attn_indexes=[1],
        output_channels=width,
        mlp_dim=2 * width,
    )
    vision.pop("intermediate_size")
    prompt = {"hidden_size": width, "image_size": side, "patch_size": vision["patch_size"]}
    prompt["mask_input_channels"] = 8
    vision["num_pos_feats"] = width // 2
    decoder = {"hidden_size": width, "mlp_dim": 2 * width, "num_attention_heads": 4}
    decoder |= {"num_hidden_layers": 2, "iou_head_hidden_dim": width}
    config = SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    config.vision_config._attn_implementation = implementation
    points = torch.tensor([[[[3.0, 5.0], [9.0, 2.0]]]])
    model = _build("SamModel", config, implementation)
    return model, {"pixel_values": _pixels(1, side), "input_points": points}


def _two_stacks(width: int) -> dict[str, Any]:
    """The words that configs of an encoder and a decoder share."""
    words = {"layers": 2, "attention_heads": 4, "ffn_dim": 2 * width}
    sides = {f"{side}_{word}": n for side in ("encoder", "decoder") for word, n in words.items()}
    return {"d_model": width, **sides}


def _resnet() -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        out_features=["stage4"],
    )


def _detr(size: int, implementation: str) -> Made:
    from transformers import DetrConfig

    width = (32, 256)[size]
    config = DetrConfig(
        use_timm_backbone=False,
        backbone=None,
        backbone_config=_resnet(),
        **_two_stacks(width),
        num_queries=(7, 100)[size],
    )
    side = (64, 512)[size]
    seen = torch.ones(2, side, side, dtype=torch.int64)
    seen[1, :, side // 2 :] = 0
    model = _build("DetrModel", config, implementation)
    return model, {"pixel_values": _pixels(2, side), "pixel_mask": seen}


def _lw_detr(size: int, implementation: str) -> Made:
    from transformers import LwDetrConfig, LwDetrViTConfig

    side, width = (64, 320)[size], (32, 192)[size]
    backbone = LwDetrViTConfig(
        **_plain(size, image_size=side, patch_size=16),
        num_windows=4,
        window_block_indices=[0],
        out_indices=[1],
        pretrain_image_size=side,
    )
    config = LwDetrConfig(
        backbone_config=backbone,
        d_model=width,
        decoder_layers=2,
        decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4,
        decoder_ffn_dim=2 * width,
        num_queries=(7, 100)[size],
        projector_scale_factors=[1.0],
        hidden_expansion=0.5,
        c2f_num_blocks=1,
        group_detr=2,
    )
    model = _build("LwDetrModel", config, implementation)
    return model, {"pixel_values": _pixels(1, side)}


def _grounding_dino(size: int, implementation: str) -> Made:
    from transformers import BertConfig, GroundingDinoConfig

    width = (32, 256)[size]
    text = BertConfig(**_plain(size, hidden_size=width, num_attention_heads=4), vocab_size=2000)
    config = GroundingDinoConfig(
        backbone_config=_swin_config(size),
        text_config=text,
        **_two_stacks(width),
        num_queries=(5, 100)[size],
        num_feature_levels=3,
        encoder_n_points=2,
        decoder_n_points=2,
        max_text_len=16,
    )
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    ids = torch.tensor([[101, 7, 8, 1012, 9, 10, 1012, 102], [101, 7, 1012, 9, 1012, 102, 0, 0]])
    model = _build("GroundingDinoModel", config, implementation)
    inputs = {"pixel_values": _pixels(2, (32, 224)[size]), "input_ids": ids}
    return model, {**inputs, "attention_mask": mask}


MODELS: dict[str, Callable[[int, str], Made]] = {
    "bert": _bert,
    "deit": _square("DeiT"),
    "detr": _detr,
    "dinov2": _dinov2,
    "grounding_dino": _grounding_dino,
    "linnet": _linnet,
    "lw_detr": _lw_detr,
    "owlv2": _owlv2,
    "sam": _sam,
    "segformer": _segformer,
    "siglip2": _siglip2,
    "swin": _swin,
    "swin2sr": _swin2sr,
    "vit": _square("ViT"),
}
"""The families that `linnet parity` can make a model of."""
