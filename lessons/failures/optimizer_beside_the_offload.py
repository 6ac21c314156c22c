"""An optimizer of your own, and ZeRO-Offload

Run:    not here: DeepSpeed compiles for a minute before it complains
Text:   deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using ZeRO-Offload with a client
        provided optimizer (<class 'torch.optim.adamw.AdamW'>) which in most cases will yield poor
        performance. Please either use deepspeed.ops.adam.DeepSpeedCPUAdam or set an optimizer in your
        ds-config
Cause:  The optimizer's states are to be on the CPU, where torch's optimizers are slow, and DeepSpeed
        refuses them there unless you insist.
Fix:    Give DeepSpeed its own: `"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}` in its
        configuration and no optimizer in the program, or `DeepSpeedCPUAdam(model.parameters())`. It
        is compiled when it is first used. To insist: `"zero_force_ds_cpu_optimizer": false`, at the
        top of the configuration.
Lesson: 13
Source: https://github.com/OptimalScale/LMFlow/issues/693
Source: https://github.com/OpenMOSS/MOSS/issues/272
Source: https://github.com/deepspeedai/Megatron-DeepSpeed/issues/298
"""
