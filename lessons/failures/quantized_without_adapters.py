"""A quantised model that is to be trained as a whole

Run:    not here: it needs a quantised model
Text:   ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable
        adapters on top of the quantized model to correctly perform fine-tuning.
Text:   ValueError: The model you are trying to fine-tune is quantized with QuantizationMethod but that
        quantization method do not support training.
Cause:  Weights in 4 or 8 bits have no gradients. Trainer found no adapters: `get_peft_model` was not
        called, its result was not used, or `merge_and_unload` has removed the adapters again.
Fix:    `model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))`, and give
        this model to Trainer. To train all weights, load the model without quantisation.
Lesson: 11
Source: https://github.com/unslothai/unsloth/issues/241
Source: https://github.com/AGI-Edgerunners/LLM-Adapters/issues/55
Source: https://github.com/BAAI-DCAI/Bunny/issues/112
"""
