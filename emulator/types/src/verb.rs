//! The verbs that a program calls, by name: those of libibverbs and librdmacm that fault injection can select.

use crate::Resource;
use core::fmt;

/// An errno of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident = $number:literal,)*) => {
        impl Errno {
            $(#[allow(missing_docs, reason = "the names are those of errno.h")] pub const $name: Errno = Errno($number);)*
            /// The errors that a fault can inject.
            pub const ALL: &[(&str, Errno)] = &[$((stringify!($name), Errno::$name)),*];
        }
    };
}

errnos! {
    EPERM = 1, ENOENT = 2, EINTR = 4, EIO = 5, ENXIO = 6, EBADF = 9, EAGAIN = 11, ENOMEM = 12, EACCES = 13, EFAULT = 14,
    EBUSY = 16, ENODEV = 19, EINVAL = 22, ENFILE = 23, EMFILE = 24, ENOSPC = 28, ERANGE = 34, ENOSYS = 38,
    EPROTO = 71, EOPNOTSUPP = 95, EADDRINUSE = 98, EADDRNOTAVAIL = 99, ENETDOWN = 100, ENETUNREACH = 101,
    ECONNRESET = 104, ENOTCONN = 107, ETIMEDOUT = 110, ECONNREFUSED = 111, EHOSTUNREACH = 113, EREMOTEIO = 121,
}

impl Errno {
    /// The error with this name.
    pub fn from_name(name: &str) -> Option<Errno> {
        Errno::ALL.iter().find(|(known, _)| *known == name).map(|(_, errno)| *errno)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Errno::ALL.iter().find(|(_, errno)| errno == self) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Errno {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Errno {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Errno, D::Error> {
        let name: alloc::string::String = serde::Deserialize::deserialize(from)?;
        Errno::from_name(&name).ok_or_else(|| {
            let known: alloc::vec::Vec<&str> = Errno::ALL.iter().map(|(name, _)| *name).collect();
            let expected = alloc::format!("one of {}", known.join(", "));
            serde::de::Error::invalid_value(serde::de::Unexpected::Str(&name), &expected.as_str())
        })
    }
}

#[cfg(feature = "schema")]
impl schemars::JsonSchema for Errno {
    fn schema_name() -> alloc::borrow::Cow<'static, str> {
        "Errno".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let names: alloc::vec::Vec<&str> = Errno::ALL.iter().map(|(name, _)| *name).collect();
        schemars::json_schema!({ "description": "An errno of Linux.", "type": "string", "enum": names })
    }
}

/// The programs whose calls of a verb a fault can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VerbReach {
    /// All programs: the Rust API has the call, and it can fail.
    AllPrograms,
    /// C programs: the Rust API has no such call, or one that cannot fail.
    CPrograms,
}

macro_rules! verbs {
    ($($variant:ident $name:literal $c_name:literal $object:tt $reach:ident [$($errno:ident)*];)*) => {
        /// A verb of libibverbs (without its prefix) or librdmacm (with its prefix).
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "the names are those of the manual pages")]
        pub enum Verb {
            $(#[cfg_attr(feature = "serde", serde(rename = $name, alias = $c_name))] $variant,)*
        }

        impl Verb {
            /// All verbs.
            pub const ALL: &[Verb] = &[$(Verb::$variant),*];

            /// Its name in scenario files and in the event log.
            pub const fn name(self) -> &'static str {
                match self { $(Verb::$variant => $name,)* }
            }

            /// Its name in C.
            pub const fn c_name(self) -> &'static str {
                match self { $(Verb::$variant => $c_name,)* }
            }

            /// The kind of object that a call is counted by; `None` for calls on the device.
            pub const fn object(self) -> Option<Resource> {
                match self { $(Verb::$variant => verbs!(@object $object),)* }
            }

            /// The programs that a fault can reach.
            pub const fn reach(self) -> VerbReach {
                match self { $(Verb::$variant => VerbReach::$reach,)* }
            }

            /// The errors that a sweep injects: those of the manual page, or of the kernel where the page names none.
            pub const fn errors(self) -> &'static [Errno] {
                match self { $(Verb::$variant => &[$(Errno::$errno),*],)* }
            }
        }
    };
    (@object -) => { None };
    (@object $kind:ident) => { Some(Resource::$kind) };
}

verbs! {
    GetDeviceList "get_device_list" "ibv_get_device_list" - CPrograms [ENOMEM EPERM ENOSYS];
    OpenDevice "open_device" "ibv_open_device" - CPrograms [ENODEV ENOMEM];
    CloseDevice "close_device" "ibv_close_device" - CPrograms [EIO];
    QueryDevice "query_device" "ibv_query_device" - CPrograms [EIO];
    QueryPort "query_port" "ibv_query_port" - CPrograms [EIO];
    QueryGid "query_gid" "ibv_query_gid" - CPrograms [EIO];
    QueryPkey "query_pkey" "ibv_query_pkey" - CPrograms [EIO];
    AllocPd "alloc_pd" "ibv_alloc_pd" - AllPrograms [ENOMEM];
    DeallocPd "dealloc_pd" "ibv_dealloc_pd" ProtectionDomain CPrograms [EBUSY];
    RegMr "reg_mr" "ibv_reg_mr" - AllPrograms [ENOMEM EINVAL EFAULT];
    ReregMr "rereg_mr" "ibv_rereg_mr" MemoryRegion AllPrograms [ENOMEM EINVAL];
    DeregMr "dereg_mr" "ibv_dereg_mr" MemoryRegion AllPrograms [EBUSY EINVAL];
    AllocMw "alloc_mw" "ibv_alloc_mw" - AllPrograms [ENOMEM EOPNOTSUPP];
    DeallocMw "dealloc_mw" "ibv_dealloc_mw" MemoryWindow CPrograms [EBUSY];
    BindMw "bind_mw" "ibv_bind_mw" QueuePair CPrograms [EINVAL ENOMEM EOPNOTSUPP];
    CreateCompChannel "create_comp_channel" "ibv_create_comp_channel" - CPrograms [ENOMEM EMFILE];
    GetCqEvent "get_cq_event" "ibv_get_cq_event" - CPrograms [EINTR EIO];
    CreateCq "create_cq" "ibv_create_cq" - AllPrograms [ENOMEM EINVAL];
    ResizeCq "resize_cq" "ibv_resize_cq" CompletionQueue AllPrograms [ENOMEM EINVAL];
    DestroyCq "destroy_cq" "ibv_destroy_cq" CompletionQueue CPrograms [EBUSY];
    ReqNotifyCq "req_notify_cq" "ibv_req_notify_cq" CompletionQueue CPrograms [EIO];
    PollCq "poll_cq" "ibv_poll_cq" CompletionQueue CPrograms [EIO];
    CreateQp "create_qp" "ibv_create_qp" - AllPrograms [ENOMEM EINVAL];
    ModifyQp "modify_qp" "ibv_modify_qp" QueuePair AllPrograms [EINVAL ENOMEM];
    QueryQp "query_qp" "ibv_query_qp" QueuePair AllPrograms [ENOMEM];
    DestroyQp "destroy_qp" "ibv_destroy_qp" QueuePair CPrograms [EBUSY];
    PostSend "post_send" "ibv_post_send" QueuePair AllPrograms [ENOMEM EINVAL EFAULT];
    PostRecv "post_recv" "ibv_post_recv" QueuePair AllPrograms [ENOMEM EINVAL EFAULT];
    CreateSrq "create_srq" "ibv_create_srq" - AllPrograms [ENOMEM EINVAL];
    ModifySrq "modify_srq" "ibv_modify_srq" SharedReceiveQueue AllPrograms [EINVAL ENOMEM];
    QuerySrq "query_srq" "ibv_query_srq" SharedReceiveQueue AllPrograms [ENOMEM];
    DestroySrq "destroy_srq" "ibv_destroy_srq" SharedReceiveQueue CPrograms [EBUSY];
    PostSrqRecv "post_srq_recv" "ibv_post_srq_recv" SharedReceiveQueue AllPrograms [ENOMEM EINVAL EFAULT];
    CreateAh "create_ah" "ibv_create_ah" - AllPrograms [ENOMEM EINVAL];
    DestroyAh "destroy_ah" "ibv_destroy_ah" AddressHandle CPrograms [EINVAL];
    AttachMcast "attach_mcast" "ibv_attach_mcast" QueuePair AllPrograms [EINVAL ENOMEM];
    DetachMcast "detach_mcast" "ibv_detach_mcast" QueuePair AllPrograms [EINVAL];
    OpenXrcd "open_xrcd" "ibv_open_xrcd" - AllPrograms [ENOMEM];
    CloseXrcd "close_xrcd" "ibv_close_xrcd" - CPrograms [EBUSY];
    GetAsyncEvent "get_async_event" "ibv_get_async_event" - CPrograms [EINTR EIO];
    RdmaCreateEventChannel "rdma_create_event_channel" "rdma_create_event_channel" - AllPrograms [ENOMEM ENODEV];
    RdmaGetCmEvent "rdma_get_cm_event" "rdma_get_cm_event" - CPrograms [EINTR EIO];
    RdmaCreateId "rdma_create_id" "rdma_create_id" - AllPrograms [ENOMEM ENODEV];
    RdmaDestroyId "rdma_destroy_id" "rdma_destroy_id" CmIdentifier CPrograms [EBUSY];
    RdmaMigrateId "rdma_migrate_id" "rdma_migrate_id" CmIdentifier AllPrograms [EINVAL];
    RdmaSetOption "rdma_set_option" "rdma_set_option" CmIdentifier AllPrograms [ENOSYS EINVAL];
    RdmaBindAddr "rdma_bind_addr" "rdma_bind_addr" CmIdentifier AllPrograms [EADDRINUSE EADDRNOTAVAIL];
    RdmaResolveAddr "rdma_resolve_addr" "rdma_resolve_addr" CmIdentifier AllPrograms [ENODEV ENETUNREACH];
    RdmaResolveRoute "rdma_resolve_route" "rdma_resolve_route" CmIdentifier AllPrograms [EINVAL ENOMEM];
    RdmaListen "rdma_listen" "rdma_listen" CmIdentifier AllPrograms [EADDRINUSE ENOMEM];
    RdmaConnect "rdma_connect" "rdma_connect" CmIdentifier AllPrograms [EINVAL ENOMEM];
    RdmaAccept "rdma_accept" "rdma_accept" CmIdentifier AllPrograms [EINVAL ENOMEM];
    RdmaReject "rdma_reject" "rdma_reject" CmIdentifier AllPrograms [EINVAL];
    RdmaEstablish "rdma_establish" "rdma_establish" CmIdentifier AllPrograms [EINVAL];
    RdmaDisconnect "rdma_disconnect" "rdma_disconnect" CmIdentifier AllPrograms [EINVAL];
    RdmaJoinMulticast "rdma_join_multicast" "rdma_join_multicast" CmIdentifier AllPrograms [EINVAL ENOMEM];
    RdmaLeaveMulticast "rdma_leave_multicast" "rdma_leave_multicast" CmIdentifier AllPrograms [EINVAL];
    RdmaGetAddrInfo "rdma_getaddrinfo" "rdma_getaddrinfo" - CPrograms [ENODEV ENOMEM];
}

impl Verb {
    /// The verb with this name, with or without the prefix `ibv_`.
    pub fn from_name(name: &str) -> Option<Verb> {
        Verb::ALL.iter().copied().find(|verb| verb.name() == name || verb.c_name() == name)
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of verbs.
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerbSet(u64);

const _: () = assert!(Verb::ALL.len() <= 64, "a VerbSet has a bit for each verb");

impl VerbSet {
    /// No verb.
    pub const EMPTY: VerbSet = VerbSet(0);
    /// Every verb.
    pub const ALL: VerbSet = VerbSet(u64::MAX);

    /// Adds a verb.
    pub const fn insert(&mut self, verb: Verb) {
        self.0 |= 1 << verb as u32;
    }

    /// Whether it has a verb.
    #[inline]
    pub const fn contains(self, verb: Verb) -> bool {
        self.0 >> verb as u32 & 1 == 1
    }
}
