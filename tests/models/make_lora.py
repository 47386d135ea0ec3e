# SPDX-License-Identifier: Apache-2.0
"""Makes the adapter folders of tests/golden: small random adapters made and saved by PEFT on two of the models there,
and the logits that PEFT computes with them (float32, eager attention). Kept so that anyone can see how each number was
obtained.
Run: pip install torch==2.11.0 transformers==5.24.0 peft==0.21.2 && python make_lora.py GOLDEN
"""
import json
import pathlib
import sys

import peft
import torch
import transformers
from safetensors.torch import save_file

ADAPTERS = {
    "gpt2-lora": ("gpt2", dict(r=3, lora_alpha=12, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True)),
    "llama-lora": ("llama", dict(r=4, lora_alpha=6, lora_dropout=0.1, use_rslora=True, target_modules="all-linear")),
}


def make(golden, name, base, options, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(golden / base, attn_implementation="eager").float()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:  # zero by default: the adapters would do nothing
                parameter.add_(torch.randn(parameter.shape) * 0.05)
        tokens = torch.randint(0, model.config.vocab_size, (2, 24))
        logits = model(tokens).logits
    folder = golden / name
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}, folder / "logits.safetensors")
    print(name, sum(p.numel() for k, p in model.named_parameters() if "lora_" in k), float(logits.abs().max()))


if __name__ == "__main__":
    for i, (name, (base, options)) in enumerate(ADAPTERS.items()):
        make(pathlib.Path(sys.argv[1]), name, base, options, 60 + i)
