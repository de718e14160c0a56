"""Reports of users of checkpoint layers, and the tests that show what they get here instead.

All reports about saving and loading on one node that can be reproduced, one per paragraph: its
number, a thread on github.com and the symptom, then ids of tests that would fail by it. A line
of ``later:`` says why there is no test yet. :mod:`test_torch_users` checks that the tests exist.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One report; ``tests`` are ids under ``tests/``, ``later`` why there are none."""

    thread: str
    symptom: str
    tests: tuple[str, ...]
    later: str = ""


def rows() -> dict[str, Row]:
    """The reports by number."""
    found = {}
    for paragraph in TABLE.strip().split("\n\n"):
        # A long id goes on in the next line.
        title, *lines = paragraph.replace("\n        ::", "::").splitlines()
        number, thread, symptom = title.split(" ", 2)
        tests = tuple(line.strip() for line in lines if "::" in line)
        later = " ".join(line.partition("later:")[2].strip() for line in lines if "::" not in line)
        found[number] = Row(thread, symptom, tests, later)
    return found


TABLE = """
A3 pytorch/pytorch/pull/149785 256 ranks 90 s -> 1.5 s with plan cache
    plan/test_plan_cache.py::test_only_equal_keys_hit
    plan/test_plan_cache.py::test_a_lost_replica_refuses_the_plan

A4 pytorch/pytorch/pull/147758 'collectives too expensive' -> rank-local checkpoints
    torch/test_torch_users.py::test_saving_and_loading_call_no_collective
    torch/test_torch_reshard.py::test_any_placement_to_any_other

A5 NVIDIA/Megatron-LM/issues/7275 large prep overhead for MoE
    torch/test_torch_bad_input.py::test_a_hundred_thousand_items

A6 NousResearch/torchtitan/pull/31 save OOMs on GPU
    torch/test_torch_users.py::test_saving_and_loading_call_no_collective

A7 pytorch/pytorch/pull/147039 async save slows training
    later: the step time beside a save in the background is a figure of the benchmark

A8 allenai/OLMo-core/pull/428 fail at a barrier before writing
    torch/test_torch_users.py::test_saving_and_loading_call_no_collective

A9 NVIDIA/Megatron-LM/pull/4628 FS metadata service collapses at thousands of ranks
    agent/test_agent_pipeline.py::test_twenty_thousand_tiny_items_make_one_dense_segment
    torch/test_torch_users.py::test_files_do_not_grow_with_ranks_or_tensors

B1 pytorch/pytorch/issues/144657 CPU tensors overwritten during async_save
    torch/test_torch_round_trip.py::test_saved_are_the_bytes_at_the_call

B2 NVIDIA/nvidia-resiliency-ext/pull/376 torn CPU tensors: step=2 with step-1 weights
    torch/test_torch_round_trip.py::test_saved_are_the_bytes_at_the_call
    e2e/test_e2e_save.py::test_save_and_load_all_different

B4 pytorch/pytorch/issues/170163 async_save leaks memory (fixed by 2.13: the owned stager is closed)
    torch/test_torch_users.py::test_many_saves_leak_neither_memory_nor_descriptors

B5 pytorch/pytorch/issues/195982 writer retains all staged tensors till file end
    torch/test_torch_users.py::test_a_saved_tensor_is_let_go

B6 radixark/Megatron-LM/pull/61 host OOM, 650 GB/node
    e2e/test_e2e_save.py::test_state_larger_than_the_budget_goes_in_waves

B9 marin-community/marin/issues/6774 26 GB/host leaked per save
    torch/test_torch_users.py::test_many_saves_leak_neither_memory_nor_descriptors

B10 google/orbax/issues/1640 3x RAM on save
    torch/test_torch_users.py::test_a_save_makes_no_private_copy

B12 Lightning-AI/pytorch-lightning/pull/17590 2x memory to remote
    torch/test_torch_users.py::test_a_save_makes_no_private_copy

B13 pytorch/torchtitan/issues/3476 async_with_pinned_mem dies with <class 'type'>
    client/test_client_save.py::test_an_error_of_the_copy_is_told_to_the_group
    torch/test_torch_bad_input.py::test_one_rank_that_cannot_save_or_load_fails_all_at_once

B14 NVIDIA-NeMo/Automodel/pull/3824 ranks stuck in different collectives
    agent/test_agent_spawn.py::test_many_ranks_start_one_agent
    e2e/test_e2e_stores.py::test_start_is_race_safe

B16 NVIDIA/Megatron-LM/issues/2422 async save blocked, nothing on disk
    client/test_client_save.py
        ::test_an_agent_that_hangs_costs_no_more_than_the_deadline_and_a_margin

B17 NVIDIA/Megatron-LM/issues/6970 worker failure not propagated -> hang
    client/test_client_save.py
        ::test_the_death_of_the_agent_ends_every_wait_and_the_next_call_starts_another
    e2e/test_e2e_save.py::test_agent_killed_in_flight_and_a_new_one_goes_on

B18 intelligent-machine-learning/dlrover/pull/1585 buffer overwritten while saving; hang
    agent/test_agent_pipeline.py::test_memory_may_be_reused_once_a_wave_is_stored
    client/test_client_save.py::test_two_epochs_in_flight_and_two_threads

B19 InternLM/xtuner/pull/1859 received 0 items of ancdata, EADDRINUSE
    e2e/test_e2e_save.py::test_20000_tensors_with_256_descriptors

B20 pytorch/pytorch/issues/11201 too many open files sharing tensors
    e2e/test_e2e_save.py::test_20000_tensors_with_256_descriptors

C1 pytorch/torchtitan/issues/3065 DCP save/load hangs forever at scale
    e2e/test_e2e_save.py::test_missing_rank_is_named_within_the_deadline
    torch/test_torch_members.py::test_absent_members_are_named

C2 NVIDIA/Megatron-LM/issues/1154 hang after 123/128 shards
    e2e/test_e2e_save.py::test_rank_killed_in_its_copy
    e2e/test_e2e_save.py::test_rank_stopped_in_its_copy_is_fenced

C3 KempnerInstitute/KempnerForge/issues/104 async save deadlocks with barrier
    torch/test_torch_users.py::test_saving_and_loading_call_no_collective

C4 KempnerInstitute/KempnerForge/issues/49 deadlock: ranks disagree whether file exists (NFS)
    torch/test_torch_ranks.py::test_four_ranks_resume_and_agree
    torch/test_torch_users.py::test_a_manifest_that_this_node_sees_late

C5 NVIDIA-NeMo/Automodel/issues/3254 interrupted save -> FileExistsError on rank 0 -> all hang
    torch/test_torch_bad_input.py::test_one_rank_that_cannot_save_or_load_fails_all_at_once

C6 pytorch/pytorch/issues/152310 dcp.save failure leaves others stuck
    torch/test_torch_bad_input.py::test_one_rank_that_cannot_save_or_load_fails_all_at_once
    crash/test_crash_processes.py::test_full_disk

C7 vllm-project/vllm/issues/50959 grouped load deadlocks: broadcast on WORLD though only PP stage
    torch/test_torch_replicas.py::test_random_states_on_fewer_ranks

C8 ByteDance-Seed/VeOmni/pull/1176 NCCL watchdog kills job while rank 0 copies
    torch/test_torch_users.py::test_saving_and_loading_call_no_collective

C9 huggingface/accelerate/issues/2375 save_state hangs
    e2e/test_e2e_save.py::test_missing_rank_is_named_within_the_deadline

C10 google/orbax/issues/392 async checkpoint hang
    client/test_client_save.py
        ::test_an_agent_that_hangs_costs_no_more_than_the_deadline_and_a_margin

C11 NVIDIA/Megatron-LM/issues/1435 wants failed save to be non-fatal
    client/test_client_save.py::test_a_failure_before_the_grant_stands_on_the_handle
    crash/test_crash_processes.py::test_full_disk

C12 goodfire-ai/spd/issues/677 SIGTERM save fired 0/6 times
    e2e/test_e2e_save.py::test_sigterm_of_ranks_loses_no_staged_epoch

C13 intelligent-machine-learning/dlrover/issues/1446 saver hang/agent restart
    e2e/test_e2e_save.py::test_rank_stopped_in_its_copy_is_fenced

D1 pytorch/torchtitan/issues/4011 .metadata exists ≠ valid; RFC SHA-256 manifest (closed)
    crash/test_crash_rot.py::test_every_byte_of_a_manifest

D2 NVIDIA/Megatron-LM/issues/1570 sporadic 1e-42 tensors
    crash/test_crash_rot.py::test_random_flips_in_segments
    torch/test_torch_round_trip.py::test_damage_is_an_error_or_the_older_epoch

D3 Lightning-AI/pytorch-lightning/issues/688 non-atomic / partially distributed checkpoint
    crash/test_crash_kill.py::test_kill_at_system_calls
    crash/test_crash_processes.py::test_processes_killed_at_random

D4 Lightning-AI/pytorch-lightning/issues/21431 corrupt in Docker/WSL
    crash/test_crash_power.py::test_power_cut_at_system_calls

D5 intelligent-machine-learning/dlrover/pull/972 nodes persist different steps; multi-agent commit
    e2e/test_e2e_save.py::test_old_process_after_a_restart_is_late
    crash/test_crash_processes.py::test_agent_killed_at_each_level

D6 google/orbax/issues/394 copied ckpt ignored: commit file lost
    torch/test_torch_users.py::test_a_copied_store_is_the_same_store
    torch/test_torch_door.py::test_store_that_moved_and_conversion

D8 vllm-project/speculators/pull/739 consumer reads unfinished ckpt
    crash/test_crash_kill.py::test_kill_at_system_calls
    backend/test_backend_posix.py::test_unfinished_records_are_hidden_and_removed

D9 NVIDIA/NVFlare/pull/5011 atomic persist got mode 0600
    backend/test_backend_posix.py::test_file_modes

D10 NVIDIA/Megatron-LM/pull/7413 dataloader ckpt clobbered
    e2e/test_e2e_stores.py::test_store_of_another_job_is_refused
    torch/test_torch_bad_input.py::test_two_ranks_with_different_names

D11 pytorch/torchtitan/pull/1729 corrupted ft checkpoint
    e2e/test_e2e_save.py::test_two_ranks_with_one_number
    e2e/test_e2e_save.py::test_two_jobs_on_one_agent

D12 pytorch/torchtitan/issues/571 wrong train_state.step after load
    torch/test_torch_round_trip.py::test_plain_values_come_back_with_their_types

D13 facebookresearch/metaseq/issues/53 zero-byte shards after save
    crash/test_crash_processes.py::test_full_disk
    crash/test_crash_rot.py::test_files_that_are_not_what_they_were

D16 huggingface/transformers/issues/27925 tmp-checkpoint rename race, 'Directory not empty'
    ../src/groupio/testing/backend_suite.py::test_one_of_many_creators_wins
    ../src/groupio/testing/backend_suite.py::test_racing_controllers_decide_once

E1 pytorch/pytorch/issues/120356 different per-rank tensors under one key lost
    torch/test_torch_ranks.py::test_four_ranks_resume_and_agree
    torch/test_torch_replicas.py::test_random_states_of_one_name_come_back_to_their_ranks

E2 NVIDIA/Megatron-LM/pull/6858 RNG wrong on 252/256 ranks
    torch/test_torch_replicas.py::test_random_states_of_one_name_come_back_to_their_ranks
    torch/test_torch_replicas.py::test_one_flipped_bit_is_found_and_located

E3 RLinf/RLinf/pull/1570 per-rank RNG lost/mixed after resume
    torch/test_torch_replicas.py::test_random_states_of_one_name_come_back_to_their_ranks

E4 NVIDIA-NeMo/Megatron-Bridge/pull/5988 larger DP: missing RNG shard crashes load
    torch/test_torch_replicas.py::test_random_states_on_more_ranks_are_missing_where_none_were_saved

E5 KempnerInstitute/KempnerForge/issues/202 EP experts lost silently
    torch/test_torch_bad_input.py::test_meshes_that_contradict_each_other
    torch/test_torch_replicas.py::test_one_flipped_bit_is_found_and_located

E6 huggingface/nanotron/issues/242 DP replicas drift; people build checksum dumpers
    torch/test_torch_replicas.py::test_one_flipped_bit_is_found_and_located
    torch/test_torch_replicas.py::test_a_drift_of_everything_is_in_any_sample

E7 pytorch/torchtitan/issues/811 won't load with larger world size (per-rank dataloader keys)
    torch/test_torch_replicas.py::test_random_states_on_more_ranks_are_missing_where_none_were_saved
    torch/test_torch_replicas.py::test_random_states_on_fewer_ranks

E8 safetensors/safetensors/issues/202 shared/tied tensors rejected or duplicated
    torch/test_torch_round_trip.py::test_tied_weights_and_views_are_stored_once_and_alone

F1 pytorch/torchtitan/issues/4035 RFC striped I/O + broadcast
    client/test_client_shared_read.py::test_equal_wants_are_read_once_and_evenly

F2 pytorch/torchtitan/issues/1058 DCP load 540 s
    client/test_client_shared_read.py::test_equal_wants_are_read_once_and_evenly
    client/test_client_shared_read.py::test_tiny_chunks_travel_together

F3 pytorch/pytorch/issues/118327 HSDP: each replica downloads
    client/test_client_shared_read.py::test_equal_wants_are_read_once_and_evenly

F4 pytorch/pytorch/pull/193909 cooperative planner / finish_load broadcast
    client/test_client_shared_read.py::test_a_small_window_is_used_again_and_again

F5 mindspore-ai/hyper-parallel/issues/624 move broadcast into read loop; ≥6 MiB batches; ~145 µs
    client/test_client_shared_read.py::test_tiny_chunks_travel_together

F6 nvidia-cosmos/cosmos-rl/pull/427 slowest rank 517 s loading 235B
    client/test_client_shared_read.py::test_equal_wants_are_read_once_and_evenly

F7 run-ai/runai-model-streamer/issues/84 wants distributed streamer
    client/test_client_shared_read.py::test_partly_common_wants

F8 foundation-model-stack/fastsafetensors/issues/29 broadcast cache eats GPU memory
    client/test_client_shared_read.py::test_a_small_window_is_used_again_and_again

F9 awslabs/s3-connector-for-pytorch/issues/199 slow DCP load from S3
    later: object stores are not there yet

F10 safetensors/safetensors/issues/562 mmap load 30-50x slower on network disks
    client/test_client_shared_read.py::test_disjoint_wants_go_straight_to_their_place

F11 sgl-project/sglang/pull/37806 28 MiB/s vs 704 GiB in 42.6 s with parallel reads
    plan/test_plan_sharing.py::test_equal_wants_are_read_evenly

F12 NVIDIA-NeMo/Automodel/issues/3576 MoE load 451 -> 26 s
    plan/test_plan_sharing.py::test_tiny_chunks_fill_a_slot

F13 PaddlePaddle/Paddle/pull/79807 227 MiB metadata unpickled on all ranks
    torch/test_torch_reshard.py::test_many_members_and_items_are_looked_up_quickly

F14 mindspore-ai/hyper-parallel/issues/897 251 s -> 29 s reading own regions only
    torch/test_torch_reshard.py::test_a_rank_reads_only_the_chunks_that_it_needs

F16 pytorch/pytorch/issues/103306 uneven / strided DTensor shards wrong
    torch/test_torch_reshard.py::test_any_placement_to_any_other
    torch/test_torch_worlds.py::test_any_world_loads_what_four_ranks_saved

G1 PrimeIntellect-ai/prime-rl/pull/2523 mkdir(exist_ok=True) raises on BeeGFS/shared FS
    ../src/groupio/testing/backend_suite.py::test_racing_creators_agree
    e2e/test_e2e_stores.py::test_start_is_race_safe

G2 NVIDIA-NeMo/Megatron-Bridge/pull/4865 NFS directory stale ~29 s
    torch/test_torch_users.py::test_a_manifest_that_this_node_sees_late

G3 awslabs/awsome-distributed-ai/pull/1225 ENOSPC with 459 GB free (one Lustre OST full)
    crash/test_crash_processes.py::test_full_disk
    backend/test_backend_faults.py::test_quota_is_full_without_a_number

G4 verl-project/verl/issues/3346 'unexpected pos A vs B'
    backend/test_backend_faults.py::test_full_disk_names_path_needed_and_free

G5 rwth-i6/returnn/issues/1829 transient write error kills run
    later: a save that failed is repeated by its caller; retries below that come with object stores

G6 pytorch/pytorch/issues/183878 FsspecWriter may drop data
    backend/test_backend_faults.py::test_failed_close_is_an_error

G7 pytorch/pytorch/issues/155992 want native S3
    later: object stores are not there yet

G9 mlcommons/storage/issues/371 'O_DIRECT' benchmark actually hits page cache
    ../src/groupio/testing/backend_suite.py::test_info_names_the_modes
    backend/test_backend_faults.py::test_file_system_without_direct_mode

G10 NVIDIA/nvidia-resiliency-ext/pull/373 write to node-local then flush
    later: levels above the node's own store come with several nodes

H1 NVIDIA-NeMo/Megatron-Bridge/pull/4678 retention deletes last good before async save is durable
    later: nothing is deleted yet: retention is not there

H2 Lightning-AI/pytorch-lightning/issues/21813 deletes the checkpoint resumed from (remote)
    later: nothing is deleted yet: retention is not there

H4 huggingface/transformers/issues/20988 several nodes delete concurrently
    ../src/groupio/testing/backend_suite.py::test_delete_is_idempotent

H5 pytorch/torchtitan/pull/4197 staged/abandoned dirs pile up
    backend/test_backend_posix.py::test_nothing_temporary_stays
    backend/test_backend_posix.py::test_unfinished_records_are_hidden_and_removed

H6 intelligent-machine-learning/dlrover/issues/1065 tracker file missing
    crash/test_crash_rot.py::test_latest_says_so_and_fallback_takes_the_newest_intact_epoch
    crash/test_crash_kill.py::test_kill_at_system_calls

H7 google/orbax/issues/999 multi-host finalisation problems
    ../src/groupio/testing/backend_suite.py::test_next_controller_completes

I1 pytorch/pytorch/issues/189308 .metadata pickle = code execution
    test_tidy.py::test_nothing_unpickles_evaluates_or_runs_a_shell
    format/test_format_dcp_metadata.py::test_only_known_names_of_torch_stand_in_it

I3 pytorch/torchtitan/issues/651 FP8 subclass fails weights_only
    torch/test_torch_bad_input.py::test_a_value_that_cannot_be_stored_is_named_and_nothing_is_saved
    torch/test_torch_round_trip.py::test_every_dtype_keeps_every_bit

I4 NVIDIA/TransformerEngine/pull/529 fp8 extra state / BytesIO cost
    torch/test_torch_users.py::test_extra_state_is_bytes_that_are_stored_once

I6 pytorch/pytorch/pull/143342 crc32 costs 20-30 % of torch.save
    later: the speed of hashing is a figure of the benchmark

I7 speechbrain/speechbrain/issues/2401 resume/restore edge cases
    torch/test_torch_ranks.py::test_four_ranks_resume_and_agree
    torch/test_torch_round_trip.py::test_training_goes_on_as_if_nothing_had_happened

"""
