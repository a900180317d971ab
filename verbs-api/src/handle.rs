//! Handles of resources.

/// Two handles are equal if they are of the same resource. A handle prints as its type and the number of the resource.
macro_rules! handle {
    ($type:ident) => {
        impl PartialEq for $type {
            fn eq(&self, other: &$type) -> bool {
                std::sync::Arc::ptr_eq(&self.inner, &other.inner)
            }
        }

        impl Eq for $type {}

        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!(stringify!($type), "({:#x})"), self.inner.id.0)
            }
        }
    };
}
pub(crate) use handle;
