"""A parameter that ZeRO-3 did not expect

Run:    not here: DeepSpeed 0.19 went through each order of modules that was tried
Text:   assert param.ds_status == ZeroParamStatus.AVAILABLE, param.ds_summary()
Text:   AssertionError: {'id': 291, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 4096,
        'shape': (0,), 'ds_shape': (4096,), 'requires_grad': True, 'grad_shape': None, 'persist':
        False, 'active_sub_modules': set()}
Text:   RuntimeError: {'id': 291, 'status': 'AVAILABLE', 'numel': 0} already in registry
Text:   RuntimeError: still have inflight params
Cause:  ZeRO-3 records in which order the modules use their parameters, gathers them a little ahead,
        and releases them afterwards. This run used them in another order: a step that left modules
        out (mixture of experts, an evaluation or generation in between), a forward that raised and
        was caught, or a module that ran outside of the engine.
Fix:    Call only the engine, and let every rank take the same path. Name modules that are not
        always used, such as a block of experts, as one unit with
        `deepspeed.utils.set_z3_leaf_modules`. Or use ZeRO 2.
Lesson: 13
Source: https://github.com/deepspeedai/DeepSpeed/issues/4194
Source: https://github.com/deepspeedai/DeepSpeed/issues/4356
"""
