"""Descriptions of GPUs that are not attached, for XLA's GPU compiler, in the text format of its message.

Source: xla/backends/gpu/target_config/specs in the sources of XLA, and for the H100 the report of a real one.
"""

_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""

_AMPERE = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 167936
  threads_per_core_limit: 2048 core_count: 108 fpus_per_core: 64 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 2039040000000 l2_cache_size: 41943040 clock_rate_ghz: 1.41
  device_memory_size: 85100068864 shared_memory_per_block_optin: 166912 cuda_compute_capability { major: 8 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA A100-SXM4-80GB"
"""

DESCRIPTIONS = {
    "h100": _HOPPER.format(bandwidth=3352320000000, memory=84929347584, name="NVIDIA H100 80GB HBM3"),
    "h200": _HOPPER.format(bandwidth=4800000000000, memory=151397597184, name="NVIDIA H200 141GB HBM3e"),
    "a100": _AMPERE,
}
