"""Names that PyTorch and torchtitan keep to themselves and this package uses: they may go with any version.

tests/titan/test_private_names.py finds those of the sources, and looks for each in the installed packages. Members of
objects stand under the class that has them. Run that test with a newer version before pyproject.toml allows it.
"""

Seen = tuple[str, str]

TORCH: Seen = ("2.11", "2.15")
"""The first and the last version in which a name was seen. Newer versions than the last have it no more."""
TORCHTITAN: Seen = ("0.2", "0.2")

_ATTENTION = "torch.ops.aten._scaled_dot_product"
_FSDP = "torch.distributed.fsdp._fully_shard"
_SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"

PRIVATE_NAMES: dict[str, Seen] = {
    # tensors and modules
    "torch._assert_async": TORCH,
    "torch._foreach_add_": TORCH,
    "torch._foreach_copy_": TORCH,
    "torch._foreach_div_": TORCH,
    "torch._foreach_mul_": TORCH,
    "torch._foreach_norm": TORCH,
    "torch._scaled_mm": TORCH,
    "torch.nn.Module._apply": TORCH,
    "torch.nn.Module._load_from_state_dict": TORCH,
    "torch.nn.Module._parameters": TORCH,
    "torch.optim.lr_scheduler.LRScheduler._last_lr": TORCH,
    "torch.utils._python_dispatch.TorchDispatchMode": TORCH,
    "torch.utils._pytree.tree_flatten": TORCH,
    "torch.Tensor._base": TORCH,
    "torch.UntypedStorage._cdata": TORCH,
    "torch.utils._pytree.tree_leaves": TORCH,
    "torch.utils._pytree.tree_map": TORCH,
    "torch.utils._pytree.tree_unflatten": TORCH,
    # attention with the log-sum-exp of its scores
    f"{_ATTENTION}_cudnn_attention": TORCH,
    f"{_ATTENTION}_cudnn_attention_backward": TORCH,
    f"{_ATTENTION}_flash_attention": TORCH,
    f"{_ATTENTION}_flash_attention_backward": TORCH,
    f"{_ATTENTION}_flash_attention_for_cpu": TORCH,
    f"{_ATTENTION}_flash_attention_for_cpu_backward": TORCH,
    # FSDP2: gradients that arrive late, blocks in pieces
    f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_group": TORCH,
    f"{_FSDP}._fsdp_state.FSDPState._lazy_init": TORCH,
    f"{_FSDP}._fsdp_state.FSDPState._post_forward": TORCH,
    f"{_FSDP}._fsdp_state.FSDPState._post_forward_hook_handle": TORCH,
    f"{_FSDP}._fsdp_state.FSDPState._pre_forward": TORCH,
    f"{_FSDP}._fsdp_state.FSDPState._pre_forward_hook_handle": TORCH,
    f"{_FSDP}._fsdp_state.FSDPState._root_post_backward_final_callback": TORCH,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.fsdp_params": TORCH,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_backward": TORCH,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._init_mp_dtypes": TORCH,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._orig_dtype": ("2.11", "2.14"),
    f"{_FSDP}._fsdp_state.FSDPState._state_ctx": TORCH,
    f"{_FSDP}._fsdp_state.FSDPStateContext.manual_backward_finalization_active": ("2.15", "2.15"),
    f"{_FSDP}._fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed": ("2.11", "2.14"),
    f"{_FSDP}._fsdp_param.FSDPParam.to_accumulated_grad_if_needed": ("2.11", "2.14"),
    # meshes, DTensor, groups
    "torch.distributed.device_mesh.DeviceMesh._concatenate": TORCH,
    "torch.distributed.device_mesh.DeviceMesh._flatten": TORCH,
    "torch.distributed.device_mesh.DeviceMesh._unflatten": TORCH,
    "torch.distributed.tensor.DTensor._spec": TORCH,
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": TORCH,
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": TORCH,
    "torch.distributed.distributed_c10d._get_default_store": TORCH,
    "torch.distributed.distributed_c10d._resolve_process_group": TORCH,
    # messages and shared memory of GPUs
    "torch.ops._c10d_functional.all_gather_into_tensor": TORCH,
    "torch.ops._c10d_functional.all_to_all_single": TORCH,
    "torch.ops._c10d_functional.wait_tensor": TORCH,
    f"{_SYMMETRIC_MEMORY}._SymmetricMemory.rendezvous": TORCH,
    f"{_SYMMETRIC_MEMORY}._group_name_to_workspace_tensor": TORCH,
    f"{_SYMMETRIC_MEMORY}.empty": TORCH,
    f"{_SYMMETRIC_MEMORY}.get_backend": TORCH,
    f"{_SYMMETRIC_MEMORY}.get_symm_mem_workspace": TORCH,
    f"{_SYMMETRIC_MEMORY}.rendezvous": TORCH,
    f"{_SYMMETRIC_MEMORY}.set_backend": TORCH,
    # the compiler
    "torch._dynamo.maybe_mark_dynamic": TORCH,
    "torch._dynamo.reset": TORCH,
    "torch._dynamo.utils.clear_compilation_metrics": TORCH,
    "torch._dynamo.utils.counters": TORCH,
    "torch._dynamo.utils.get_compilation_metrics": TORCH,
    "torch._dynamo.utils.set_compilation_metrics_limit": TORCH,
    "torch._inductor.codegen.common.CSE.invalidated_stores": TORCH,
    "torch._inductor.codegen.triton.TritonKernel.load": TORCH,
    "torch._inductor.config.deterministic": TORCH,
    "torch._inductor.config.patch": TORCH,
    # checkpoints
    "torch.distributed.checkpoint.filesystem._StorageInfo": TORCH,
    "torch.distributed.checkpoint.HuggingFaceStorageReader._process_read_request": TORCH,
    "torch.distributed.checkpoint.QuantizedHuggingFaceStorageReader._build_weight_scale_mapping": TORCH,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": TORCH,
    "torch.serialization._get_layout": TORCH,
    # the device type that torchtitan reads, profiles, what a stuck rank was doing
    "torch._utils._get_available_device_type": TORCH,
    "torch.autograd._profiler_enabled": TORCH,
    "torch._C._distributed_c10d._dump_fr_trace_json": TORCH,
    "torch._C._distributed_c10d._dump_nccl_trace_json": TORCH,
    # torchtitan
    "torchtitan.components.checkpoint.ModelWrapper._get_state_dict": TORCHTITAN,
    "torchtitan.components.optimizer.OptimizersContainer._post_init": TORCHTITAN,
}
"""Full name -> the versions in which it was seen."""

NEEDS_CUDA = {"torch._C._distributed_c10d._dump_nccl_trace_json"}
"""Those that a build for CPUs does not have."""

OF_THE_LIBRARY = {"_option_string_actions"}
"""Private members of objects of Python's own library."""
