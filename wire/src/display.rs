//! `Display` from a text with fields in braces, and `Debug` from `Display`.

/// Implements `Display` with a text that has fields in braces.
macro_rules! display {
    ($name:ident { $($field:ident),* }) => {};
    ($name:ident { $($field:ident),* } $text:literal) => {
        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                #[allow(unused_variables, reason = "the text names some of the fields")]
                let $name { $($field,)* .. } = self;
                write!(f, $text)
            }
        }
    };
}
pub(crate) use display;

/// Implements `Debug` with the name of the type around its `Display`.
macro_rules! debug_as_display {
    ($($name:ident),*) => {$(
        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    )*};
}
pub(crate) use debug_as_display;
