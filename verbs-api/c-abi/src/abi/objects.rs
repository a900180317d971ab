//! Objects.

use super::*;
use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::MaybeUninit;

/// Space for a mutex of the C library, which this library does not use. Its size depends on the processor.
pub type Mutex = [u64; size_of::<libc::pthread_mutex_t>() / size_of::<u64>()];
/// Space for a condition variable of the C library, which this library does not use.
pub type Condition = [u64; size_of::<libc::pthread_cond_t>() / size_of::<u64>()];
/// A slot without a caller, or null for an unsupported verb.
pub type Unused = *const c_void;

#[repr(C)]
pub struct ibv_device {
    pub ops: [usize; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_context_ops {
    pub unused_0: [usize; 7],
    pub alloc_mw: extern "C" fn(Handle<Pd>, c_int) -> Handle<Mw>,
    pub bind_mw: extern "C" fn(Handle<Qp>, Handle<Mw>, &ibv_mw_bind) -> c_int,
    pub dealloc_mw: extern "C" fn(Handle<Mw>) -> c_int,
    pub unused_1: usize,
    pub poll_cq: extern "C" fn(Handle<Cq>, c_int, *mut ibv_wc) -> c_int,
    pub req_notify_cq: extern "C" fn(Handle<Cq>, c_int) -> c_int,
    pub unused_2: [usize; 7],
    pub post_srq_recv: extern "C" fn(Handle<Srq>, *mut ibv_recv_wr, Option<&mut *mut ibv_recv_wr>) -> c_int,
    pub unused_3: [usize; 4],
    pub post_send: extern "C" fn(Handle<Qp>, *mut ibv_send_wr, Option<&mut *mut ibv_send_wr>) -> c_int,
    pub post_recv: extern "C" fn(Handle<Qp>, *mut ibv_recv_wr, Option<&mut *mut ibv_recv_wr>) -> c_int,
    pub unused_4: [usize; 5],
}

#[repr(C)]
pub struct ibv_context {
    pub device: Option<&'static DeviceState>,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: Mutex,
    pub abi_compat: *mut c_void,
}

/// Grows at its front: programs access its slots relative to `context`.
#[repr(C)]
pub struct verbs_context {
    pub query_port: extern "C" fn(ContextHandle, u8, *mut ibv_port_attr, usize) -> c_int,
    pub advise_mr: Unused,
    pub alloc_null_mr: Unused,
    pub read_counters: Unused,
    pub attach_counters_point_flow: Unused,
    pub create_counters: Unused,
    pub destroy_counters: Unused,
    pub reg_dm_mr: Unused,
    pub alloc_dm: Unused,
    pub free_dm: Unused,
    pub modify_flow_action_esp: Unused,
    pub destroy_flow_action: Unused,
    pub create_flow_action_esp: Unused,
    pub modify_qp_rate_limit: Unused,
    pub alloc_parent_domain: extern "C" fn(ContextHandle, &ibv_parent_domain_init_attr) -> Handle<Pd>,
    pub dealloc_td: extern "C" fn(Handle<Td>) -> c_int,
    pub alloc_td: extern "C" fn(ContextHandle, &ibv_td_init_attr) -> Handle<Td>,
    pub modify_cq: Unused,
    pub post_srq_ops: Unused,
    pub destroy_rwq_ind_table: Unused,
    pub create_rwq_ind_table: Unused,
    pub destroy_wq: Unused,
    pub modify_wq: Unused,
    pub create_wq: Unused,
    pub query_rt_values: Unused,
    pub create_cq_ex: extern "C" fn(ContextHandle, &ibv_cq_init_attr_ex) -> Handle<Cq>,
    pub private: Unused,
    pub query_device_ex: extern "C" fn(ContextHandle, Option<&u32>, *mut ibv_device_attr_ex, usize) -> c_int,
    pub ibv_destroy_flow: Unused,
    pub placeholder_2: Unused,
    pub ibv_create_flow: Unused,
    pub placeholder_1: Unused,
    pub open_qp: Unused,
    pub create_qp_ex: extern "C" fn(ContextHandle, &mut ibv_qp_init_attr_ex) -> Handle<Qp>,
    pub get_srq_num: extern "C" fn(Handle<Srq>, &mut MaybeUninit<u32>) -> c_int,
    pub create_srq_ex: extern "C" fn(ContextHandle, &mut ibv_srq_init_attr_ex) -> Handle<Srq>,
    pub open_xrcd: extern "C" fn(ContextHandle, &ibv_xrcd_init_attr) -> Handle<Xrcd>,
    pub close_xrcd: extern "C" fn(Handle<Xrcd>) -> c_int,
    pub placeholder_3: u64,
    pub sz: usize,
    pub context: ibv_context,
}

#[repr(C)]
pub struct ibv_pd {
    pub context: ContextHandle,
    pub handle: u32,
}

#[repr(C)]
pub struct ibv_td {
    pub context: ContextHandle,
}

#[repr(C)]
pub struct ibv_mr {
    pub context: ContextHandle,
    pub pd: Handle<Pd>,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct ibv_mw {
    pub context: ContextHandle,
    pub pd: Handle<Pd>,
    pub rkey: u32,
    pub handle: u32,
    pub r#type: c_int,
}

#[repr(C)]
pub struct ibv_comp_channel {
    pub context: ContextHandle,
    pub fd: c_int,
    pub refcnt: c_int,
}

#[repr(C)]
pub struct ibv_cq {
    pub context: ContextHandle,
    pub channel: Handle<CompletionChannelState>,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: Mutex,
    pub cond: Condition,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
}

/// Begins like [`ibv_cq`].
#[repr(C)]
pub struct ibv_cq_ex {
    pub context: ContextHandle,
    pub channel: Handle<CompletionChannelState>,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
    pub mutex: Mutex,
    pub cond: Condition,
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
    pub comp_mask: u32,
    pub status: c_int,
    pub wr_id: u64,
    pub start_poll: extern "C" fn(Handle<Cq>, &ibv_poll_cq_attr) -> c_int,
    pub next_poll: extern "C" fn(Handle<Cq>) -> c_int,
    pub end_poll: extern "C" fn(Handle<Cq>),
    pub read_opcode: extern "C" fn(Handle<Cq>) -> c_int,
    pub read_vendor_err: extern "C" fn(Handle<Cq>) -> u32,
    pub read_byte_len: extern "C" fn(Handle<Cq>) -> u32,
    pub read_imm_data: extern "C" fn(Handle<Cq>) -> u32,
    pub read_qp_num: extern "C" fn(Handle<Cq>) -> u32,
    pub read_src_qp: extern "C" fn(Handle<Cq>) -> u32,
    pub read_wc_flags: extern "C" fn(Handle<Cq>) -> c_uint,
    pub read_slid: extern "C" fn(Handle<Cq>) -> u32,
    pub read_sl: extern "C" fn(Handle<Cq>) -> u8,
    pub read_dlid_path_bits: extern "C" fn(Handle<Cq>) -> u8,
    pub read_completion_ts: extern "C" fn(Handle<Cq>) -> u64,
    pub read_cvlan: Unused,
    pub read_flow_tag: Unused,
    pub read_tm_info: Unused,
    pub read_completion_wallclock_ns: Unused,
}

#[repr(C)]
pub struct ibv_qp {
    pub context: ContextHandle,
    pub qp_context: *mut c_void,
    pub pd: Handle<Pd>,
    pub send_cq: Handle<Cq>,
    pub recv_cq: Handle<Cq>,
    pub srq: Handle<Srq>,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_int,
    pub qp_type: c_int,
    pub mutex: Mutex,
    pub cond: Condition,
    pub events_completed: u32,
}

#[repr(C)]
pub struct ibv_qp_ex {
    pub base: ibv_qp,
    pub comp_mask: u64,
    pub wr_id: u64,
    pub wr_flags: c_uint,
    pub wr_atomic_cmp_swp: extern "C" fn(Handle<Qp>, u32, u64, u64, u64),
    pub wr_atomic_fetch_add: extern "C" fn(Handle<Qp>, u32, u64, u64),
    pub wr_bind_mw: extern "C" fn(Handle<Qp>, Handle<Mw>, u32, &ibv_mw_bind_info),
    pub wr_local_inv: extern "C" fn(Handle<Qp>, u32),
    pub wr_rdma_read: extern "C" fn(Handle<Qp>, u32, u64),
    pub wr_rdma_write: extern "C" fn(Handle<Qp>, u32, u64),
    pub wr_rdma_write_imm: extern "C" fn(Handle<Qp>, u32, u64, u32),
    pub wr_send: extern "C" fn(Handle<Qp>),
    pub wr_send_imm: extern "C" fn(Handle<Qp>, u32),
    pub wr_send_inv: extern "C" fn(Handle<Qp>, u32),
    pub wr_send_tso: Unused,
    pub wr_set_ud_addr: extern "C" fn(Handle<Qp>, Handle<Ah>, u32, u32),
    pub wr_set_xrc_srqn: extern "C" fn(Handle<Qp>, u32),
    pub wr_set_inline_data: extern "C" fn(Handle<Qp>, *mut c_void, usize),
    pub wr_set_inline_data_list: unsafe extern "C" fn(Handle<Qp>, usize, *const ibv_data_buf),
    pub wr_set_sge: extern "C" fn(Handle<Qp>, u32, u64, u32),
    pub wr_set_sge_list: unsafe extern "C" fn(Handle<Qp>, usize, *const ibv_sge),
    pub wr_start: extern "C" fn(Handle<Qp>),
    pub wr_complete: extern "C" fn(Handle<Qp>) -> c_int,
    pub wr_abort: extern "C" fn(Handle<Qp>),
    pub wr_atomic_write: Unused,
}

#[repr(C)]
pub struct ibv_srq {
    pub context: ContextHandle,
    pub srq_context: *mut c_void,
    pub pd: Handle<Pd>,
    pub handle: u32,
    pub mutex: Mutex,
    pub cond: Condition,
    pub events_completed: u32,
}

#[repr(C)]
pub struct ibv_ah {
    pub context: ContextHandle,
    pub pd: Handle<Pd>,
    pub handle: u32,
}

#[repr(C)]
pub struct ibv_xrcd {
    pub context: ContextHandle,
}
