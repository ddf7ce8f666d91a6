"""The small model in PyTorch: frozen below, trained in its last layers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from examples.train_demo.trainer.sequences import Sequences

# Names of a layer's tensors: transformers', and those of the GGUF file that the server knows.
TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}

Weights = Mapping[str, Tensor]


class Layers(nn.Module):
    """A run of the model's layers, with the last norm where it ends the model."""

    def __init__(self, layers: nn.ModuleList, norm: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.norm = norm

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return the hidden states [sequence, position, size] after the last layer."""
        for layer in self.layers:
            # No mask: attention is causal, so padding behind a sequence changes nothing in it.
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        return self.norm(hidden)


class SmallModel:
    """SmolLM2-135M from its GGUF file, dequantised: the very weights that the server begins with.

    Only the last `trained_layers` layers are trained: what lies below is computed without
    gradients, and only they are exchanged with the server.
    """

    def __init__(self, gguf: Path, trained_layers: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="sdpa"
        )
        model.eval().requires_grad_(False)
        self.config = model.config
        self.first_trained = self.config.num_hidden_layers - trained_layers
        self._embedding = model.model.embed_tokens
        self._rotary = model.model.rotary_emb
        self._frozen = Layers(model.model.layers[: self.first_trained], nn.Identity())
        self._trained = Layers(model.model.layers[self.first_trained :], model.model.norm)
        self._trained.layers.requires_grad_(True)

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained."""
        return list(self._trained.layers.parameters())

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of what is trained, as it is now."""
        return {name: value.detach().clone() for name, value in self._named()}

    @torch.no_grad()
    def lower(self, sequences: Sequences) -> Tensor:
        """Return the hidden states [sequence, position, size] below the trained layers."""
        hidden = self._embedding(sequences.ids)
        return self._frozen(hidden, self._rotate(hidden))

    def logprobs(
        self, lower: Tensor, sequences: Sequences, weights: Weights | None = None
    ) -> Tensor:
        """Return the log-probability of each sampled token, [token].

        By the present weights, with gradients; or by other ones of the trained layers.
        """
        rotary = self._rotate(lower)
        if weights is None:
            hidden = self._trained(lower, rotary)
        else:
            hidden = functional_call(self._trained, dict(weights), (lower, rotary))
        before = hidden[sequences.rows, sequences.places - 1]
        logits = before @ self._embedding.weight.T
        targets = sequences.ids[sequences.rows, sequences.places]
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return the trained tensors by the names and in the layout of the GGUF file."""
        found = {}
        for number, layer in enumerate(self._trained.layers, self.first_trained):
            values = dict(layer.named_parameters())
            for name, gguf_name in TENSORS.items():
                value = values.pop(name).detach().numpy()
                found[f"blk.{number}.{gguf_name}"] = self._interleaved(name, value)
            assert not values, f"tensors without a name in the file: {sorted(values)}"
        return found

    def _interleaved(self, name: str, value: NDArray[np.float32]) -> NDArray[np.float32]:
        """Order the rows of queries and keys as the file does: rotated pairs are neighbours."""
        if name == "self_attn.q_proj.weight":
            heads = self.config.num_attention_heads
        elif name == "self_attn.k_proj.weight":
            heads = self.config.num_key_value_heads
        else:
            return value
        halves = value.reshape(heads, 2, -1, value.shape[1])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        named = self._trained.named_parameters()
        return [(name, value) for name, value in named if value.requires_grad]

    def _rotate(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(hidden.shape[1])[None]
        cos, sin = self._rotary(hidden, places)
        return cos, sin
