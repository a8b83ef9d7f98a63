//! libibverbs as this crate calls it: its C types, and its functions, found at run time.
//!
//! The library is opened on first use and never linked, so that a daemon starts on a host without RDMA. The
//! types below are those of `infiniband/verbs.h` (symbol versions `IBVERBS_1.0` and `1.1`, unchanged since
//! 2008); only what is used is declared, and the layout is asserted at compile time against the numbers that
//! the C compiler gives. The four calls of the data path are inline functions in C, which go through a table
//! in the context: here too.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io;
use std::ptr;
use std::sync::OnceLock;

use super::error::VerbsError;

/// An opaque `struct ibv_device`.
#[repr(C)]
pub struct Device {
    _private: [u8; 0],
}

/// An opaque `struct ibv_srq`.
#[repr(C)]
pub struct Srq {
    _private: [u8; 0],
}

/// `struct ibv_context`, as far as it is used.
#[repr(C)]
pub struct Context {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

/// `struct ibv_context_ops`: what is not used is a pointer without a type.
#[repr(C)]
pub struct ContextOps {
    unused_0: [*const c_void; 7],
    pub alloc_mw: Option<unsafe extern "C" fn(pd: *mut Pd, kind: c_uint) -> *mut Mw>,
    pub bind_mw: Option<unsafe extern "C" fn(qp: *mut Qp, mw: *mut Mw, bind: *mut MwBind) -> c_int>,
    pub dealloc_mw: Option<unsafe extern "C" fn(mw: *mut Mw) -> c_int>,
    unused_3: *const c_void,
    pub poll_cq: Option<unsafe extern "C" fn(cq: *mut Cq, count: c_int, wc: *mut Wc) -> c_int>,
    pub req_notify_cq: Option<unsafe extern "C" fn(cq: *mut Cq, solicited_only: c_int) -> c_int>,
    unused_1: [*const c_void; 12],
    pub post_send: Option<unsafe extern "C" fn(qp: *mut Qp, wr: *mut SendWr, bad: *mut *mut SendWr) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(qp: *mut Qp, wr: *mut RecvWr, bad: *mut *mut RecvWr) -> c_int>,
    unused_2: [*const c_void; 5],
}

/// `struct ibv_pd`.
#[repr(C)]
pub struct Pd {
    pub context: *mut Context,
}

/// `struct ibv_mr`.
#[repr(C)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_mw`.
#[repr(C)]
pub struct Mw {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub rkey: u32,
    pub handle: u32,
    pub kind: c_uint,
}

/// `struct ibv_mw_bind`, with the `struct ibv_mw_bind_info` that it contains.
#[repr(C)]
pub struct MwBind {
    pub wr_id: u64,
    pub send_flags: c_uint,
    pub mr: *mut Mr,
    pub addr: u64,
    /// 0: the window is closed.
    pub length: u64,
    pub access: c_uint,
}

/// `struct ibv_comp_channel`.
#[repr(C)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
}

/// `struct ibv_cq`, as far as it is used.
#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
}

/// `struct ibv_qp`, as far as it is used.
#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
    pub qp_context: *mut c_void,
    pub pd: *mut Pd,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub handle: u32,
    pub qp_num: u32,
}

/// `union ibv_gid`, in network byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C, align(8))]
pub struct Gid(pub [u8; 16]);

/// `struct ibv_sge`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`, its unions cut to RDMA.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *const Sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    /// In network byte order.
    pub imm_data: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub unused: [u64; 9],
}

impl Default for SendWr {
    fn default() -> Self {
        SendWr {
            wr_id: 0,
            next: ptr::null_mut(),
            sg_list: ptr::null(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            unused: [0; 9],
        }
    }
}

/// `struct ibv_recv_wr`.
#[derive(Debug)]
#[repr(C)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *const Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct Wc {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// In network byte order.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// `struct ibv_qp_cap`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub cap: QpCap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// `struct ibv_global_route`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_attr`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct QpAttr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

/// `struct ibv_port_attr`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub struct PortAttr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

/// `struct ibv_device_attr`: the limits that are looked at, and what lies between them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct DeviceAttr {
    pub fw_ver: [c_char; 64],
    unused_0: [u64; 4],
    pub vendor_id: u32,
    unused_1: [u32; 2],
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    unused_2: [u32; 21],
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

impl DeviceAttr {
    pub(super) fn zeroed() -> DeviceAttr {
        // SAFETY: every field is an integer.
        unsafe { std::mem::zeroed() }
    }
}

/// `struct ibv_async_event`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AsyncEvent {
    /// A port's number, or a pointer.
    pub element: u64,
    pub event_type: c_uint,
}

// What the C compiler says of verbs.h, on every 64-bit target.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::offset_of;
    assert!(
        size_of::<SendWr>() == 128
            && offset_of!(SendWr, imm_data) == 36
            && offset_of!(SendWr, remote_addr) == 40
    );
    assert!(size_of::<RecvWr>() == 32 && size_of::<Wc>() == 48 && offset_of!(Wc, wc_flags) == 36);
    assert!(
        size_of::<QpAttr>() == 144
            && offset_of!(QpAttr, ah_attr) == 56
            && offset_of!(QpAttr, rnr_retry) == 132
    );
    assert!(offset_of!(QpAttr, pkey_index) == 120 && offset_of!(QpAttr, timeout) == 130);
    assert!(size_of::<QpInitAttr>() == 64 && size_of::<AhAttr>() == 32 && offset_of!(AhAttr, port_num) == 30);
    assert!(size_of::<PortAttr>() == 52 && offset_of!(PortAttr, link_layer) == 46);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, max_qp_wr) == 112);
    assert!(offset_of!(DeviceAttr, max_cqe) == 132 && offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(size_of::<ContextOps>() == 256 && offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, alloc_mw) == 56 && offset_of!(ContextOps, dealloc_mw) == 72);
    assert!(size_of::<Mw>() == 32 && offset_of!(Mw, rkey) == 16 && offset_of!(Mw, kind) == 24);
    assert!(size_of::<MwBind>() == 48 && offset_of!(MwBind, mr) == 16 && offset_of!(MwBind, access) == 40);
    assert!(offset_of!(DeviceAttr, device_cap_flags) == 116);
    assert!(offset_of!(ContextOps, post_send) == 200 && offset_of!(ContextOps, post_recv) == 208);
    assert!(offset_of!(Context, ops) == 8 && offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Qp, qp_num) == 52 && offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(offset_of!(CompChannel, fd) == 8 && size_of::<AsyncEvent>() == 16);
};

/// `IBV_WR_*`, `IBV_WC_*`, and the other numbers that are used.
pub mod number {
    pub const WR_RDMA_WRITE_WITH_IMM: u32 = 1;
    pub const WR_SEND: u32 = 2;
    pub const SEND_SIGNALED: u32 = 2;
    pub const SEND_INLINE: u32 = 8;
    pub const WC_SUCCESS: u32 = 0;
    pub const WC_WR_FLUSH_ERR: u32 = 5;
    pub const WC_REM_INV_REQ_ERR: u32 = 9;
    pub const WC_REM_ACCESS_ERR: u32 = 10;
    pub const WC_RETRY_EXC_ERR: u32 = 12;
    pub const WC_RNR_RETRY_EXC_ERR: u32 = 13;
    pub const WC_RECV: u32 = 128;
    pub const WC_RECV_RDMA_WITH_IMM: u32 = 129;
    pub const QPT_RC: u32 = 2;
    pub const QPS_INIT: u32 = 1;
    pub const QPS_RTR: u32 = 2;
    pub const QPS_RTS: u32 = 3;
    pub const QPS_ERR: u32 = 6;
    pub const QP_STATE: c_int = 1;
    pub const QP_ACCESS_FLAGS: c_int = 1 << 3;
    pub const QP_PKEY_INDEX: c_int = 1 << 4;
    pub const QP_PORT: c_int = 1 << 5;
    pub const QP_AV: c_int = 1 << 7;
    pub const QP_PATH_MTU: c_int = 1 << 8;
    pub const QP_TIMEOUT: c_int = 1 << 9;
    pub const QP_RETRY_CNT: c_int = 1 << 10;
    pub const QP_RNR_RETRY: c_int = 1 << 11;
    pub const QP_RQ_PSN: c_int = 1 << 12;
    pub const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub const QP_MIN_RNR_TIMER: c_int = 1 << 15;
    pub const QP_SQ_PSN: c_int = 1 << 16;
    pub const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub const QP_DEST_QPN: c_int = 1 << 20;
    pub const ACCESS_LOCAL_WRITE: c_int = 1;
    pub const ACCESS_REMOTE_WRITE: c_int = 2;
    pub const ACCESS_MW_BIND: c_int = 1 << 4;
    pub const DEVICE_MEM_WINDOW: u32 = 1 << 17;
    pub const MW_TYPE_1: u32 = 1;
    pub const LINK_LAYER_ETHERNET: u8 = 2;
    pub const PORT_ACTIVE: u32 = 4;
    pub const PORT_ACTIVE_DEFER: u32 = 5;
    pub const EVENT_CQ_ERR: u32 = 0;
    pub const EVENT_QP_FATAL: u32 = 1;
    pub const EVENT_QP_REQ_ERR: u32 = 2;
    pub const EVENT_QP_ACCESS_ERR: u32 = 3;
    pub const EVENT_DEVICE_FATAL: u32 = 8;
    pub const EVENT_PORT_ACTIVE: u32 = 9;
    pub const EVENT_PORT_ERR: u32 = 10;
    use std::ffi::c_int;
}

/// The functions of libibverbs. Each is what `verbs.h` declares by that name with `ibv_` before it.
pub struct Library {
    pub get_device_list: unsafe extern "C" fn(count: *mut c_int) -> *mut *mut Device,
    pub free_device_list: unsafe extern "C" fn(list: *mut *mut Device),
    pub get_device_name: unsafe extern "C" fn(device: *mut Device) -> *const c_char,
    pub open_device: unsafe extern "C" fn(device: *mut Device) -> *mut Context,
    pub close_device: unsafe extern "C" fn(context: *mut Context) -> c_int,
    pub query_device: unsafe extern "C" fn(context: *mut Context, attr: *mut DeviceAttr) -> c_int,
    pub query_port: unsafe extern "C" fn(context: *mut Context, port: u8, attr: *mut PortAttr) -> c_int,
    pub query_gid:
        unsafe extern "C" fn(context: *mut Context, port: u8, index: c_int, gid: *mut Gid) -> c_int,
    pub query_pkey:
        unsafe extern "C" fn(context: *mut Context, port: u8, index: c_int, pkey: *mut u16) -> c_int,
    pub get_async_event: unsafe extern "C" fn(context: *mut Context, event: *mut AsyncEvent) -> c_int,
    pub ack_async_event: unsafe extern "C" fn(event: *mut AsyncEvent),
    pub alloc_pd: unsafe extern "C" fn(context: *mut Context) -> *mut Pd,
    pub dealloc_pd: unsafe extern "C" fn(pd: *mut Pd) -> c_int,
    pub reg_mr: unsafe extern "C" fn(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr,
    pub dereg_mr: unsafe extern "C" fn(mr: *mut Mr) -> c_int,
    /// `None`: rdma-core is older than version 34.
    pub reg_dmabuf_mr: Option<
        unsafe extern "C" fn(
            pd: *mut Pd,
            offset: u64,
            length: usize,
            iova: u64,
            fd: c_int,
            access: c_int,
        ) -> *mut Mr,
    >,
    pub create_comp_channel: unsafe extern "C" fn(context: *mut Context) -> *mut CompChannel,
    pub destroy_comp_channel: unsafe extern "C" fn(channel: *mut CompChannel) -> c_int,
    pub create_cq: unsafe extern "C" fn(
        context: *mut Context,
        cqe: c_int,
        cq_context: *mut c_void,
        channel: *mut CompChannel,
        comp_vector: c_int,
    ) -> *mut Cq,
    pub destroy_cq: unsafe extern "C" fn(cq: *mut Cq) -> c_int,
    pub get_cq_event: unsafe extern "C" fn(
        channel: *mut CompChannel,
        cq: *mut *mut Cq,
        cq_context: *mut *mut c_void,
    ) -> c_int,
    pub ack_cq_events: unsafe extern "C" fn(cq: *mut Cq, count: c_uint),
    pub create_qp: unsafe extern "C" fn(pd: *mut Pd, attr: *mut QpInitAttr) -> *mut Qp,
    pub modify_qp: unsafe extern "C" fn(qp: *mut Qp, attr: *mut QpAttr, mask: c_int) -> c_int,
    pub destroy_qp: unsafe extern "C" fn(qp: *mut Qp) -> c_int,
    pub wc_status_str: unsafe extern "C" fn(status: c_uint) -> *const c_char,
}

/// The library's name.
const NAME: &CStr = c"libibverbs.so.1";

impl Library {
    /// The library, opened at the first call. It stays open.
    pub fn get() -> Result<&'static Library, VerbsError> {
        #[cfg(any(test, fuzzing, feature = "software-verbs"))]
        if let Some(software) = super::software::installed() {
            return Ok(software);
        }
        static LIBRARY: OnceLock<Result<Library, (String, String)>> = OnceLock::new();
        let library = LIBRARY.get_or_init(|| match Library::open(NAME) {
            Ok(library) => Ok(library),
            Err(VerbsError::Library { name, reason }) => Err((name, reason)),
            Err(other) => Err((NAME.to_string_lossy().into_owned(), other.to_string())),
        });
        library
            .as_ref()
            .map_err(|(name, reason)| VerbsError::Library { name: name.clone(), reason: reason.clone() })
    }

    fn open(name: &CStr) -> Result<Library, VerbsError> {
        let failed = || {
            // SAFETY: dlerror gives null or a text that is valid until this thread's next call of the family.
            let text = unsafe {
                let text = libc::dlerror();
                if text.is_null() {
                    "no reason given".into()
                } else {
                    CStr::from_ptr(text).to_string_lossy().into_owned()
                }
            };
            VerbsError::Library { name: name.to_string_lossy().into_owned(), reason: text }
        };
        // SAFETY: opening libibverbs runs its constructors, which touch nothing of ours.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(failed());
        }
        // SAFETY: a valid handle and a NUL-terminated name.
        let find = |name: &CStr| unsafe { libc::dlsym(handle, name.as_ptr()) };
        macro_rules! symbol {
            ($name:literal) => {{
                let found = find($name);
                if found.is_null() {
                    return Err(failed());
                }
                // SAFETY: `verbs.h` declares the function of this name with the type of the field that takes
                // it, a pointer like the one found.
                unsafe { std::mem::transmute_copy(&found) }
            }};
        }
        Ok(Library {
            get_device_list: symbol!(c"ibv_get_device_list"),
            free_device_list: symbol!(c"ibv_free_device_list"),
            get_device_name: symbol!(c"ibv_get_device_name"),
            open_device: symbol!(c"ibv_open_device"),
            close_device: symbol!(c"ibv_close_device"),
            query_device: symbol!(c"ibv_query_device"),
            query_port: symbol!(c"ibv_query_port"),
            query_gid: symbol!(c"ibv_query_gid"),
            query_pkey: symbol!(c"ibv_query_pkey"),
            get_async_event: symbol!(c"ibv_get_async_event"),
            ack_async_event: symbol!(c"ibv_ack_async_event"),
            alloc_pd: symbol!(c"ibv_alloc_pd"),
            dealloc_pd: symbol!(c"ibv_dealloc_pd"),
            reg_mr: symbol!(c"ibv_reg_mr"),
            dereg_mr: symbol!(c"ibv_dereg_mr"),
            reg_dmabuf_mr: match find(c"ibv_reg_dmabuf_mr") {
                found if found.is_null() => None,
                // SAFETY: as above.
                found => Some(unsafe { std::mem::transmute_copy(&found) }),
            },
            create_comp_channel: symbol!(c"ibv_create_comp_channel"),
            destroy_comp_channel: symbol!(c"ibv_destroy_comp_channel"),
            create_cq: symbol!(c"ibv_create_cq"),
            destroy_cq: symbol!(c"ibv_destroy_cq"),
            get_cq_event: symbol!(c"ibv_get_cq_event"),
            ack_cq_events: symbol!(c"ibv_ack_cq_events"),
            create_qp: symbol!(c"ibv_create_qp"),
            modify_qp: symbol!(c"ibv_modify_qp"),
            destroy_qp: symbol!(c"ibv_destroy_qp"),
            wc_status_str: symbol!(c"ibv_wc_status_str"),
        })
    }

    /// What libibverbs calls a completion's status.
    pub fn status_text(&self, status: u32) -> String {
        // SAFETY: takes any number, and gives a static text or null.
        unsafe {
            let text = (self.wc_status_str)(status);
            if text.is_null() {
                format!("status {status}")
            } else {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            }
        }
    }
}

/// The result of a call that returns 0 or an errno (`ibv_modify_qp`) or 0 or -1 with errno (others): positive
/// numbers are taken as errno.
pub fn check(what: &str, result: c_int) -> Result<(), VerbsError> {
    match result {
        0 => Ok(()),
        n if n > 0 => Err(VerbsError::call(what, io::Error::from_raw_os_error(n))),
        _ => Err(VerbsError::call(what, io::Error::last_os_error())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_library_gets_an_error_that_names_it() {
        let Err(error) = Library::open(c"libibverbs-absent.so.1") else { panic!("it opened") };
        let text = error.to_string();
        assert!(text.contains("libibverbs-absent.so.1") && text.contains("libibverbs1"), "{text}");
    }

    #[test]
    fn a_library_without_the_functions_is_refused() {
        let Err(error) = Library::open(c"libm.so.6") else { panic!("libm has verbs") };
        assert!(error.to_string().contains("ibv_get_device_list"), "{error}");
    }
}
