//! Numbers whose values have a text in the specification.

/// Declares a number whose values have a text in the specification; a further comment explains the text.
macro_rules! code {
    ($(#[$doc:meta])* $name:ident($inner:ty), $width:literal { $($(#[$value_doc:meta])* $value:ident = $number:literal $text:literal,)* }) => {
        $(#[$doc])*
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl $name {
            $( #[doc = $text] #[doc = ""] $(#[$value_doc])* pub const $value: $name = $name($number); )*

            /// The meaning, if the specification defines the number.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $( $number => Some($text), )*
                    _ => None,
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{} ({name})", self.0),
                    None => core::fmt::Display::fmt(&self.0, f),
                }
            }
        }

        $crate::layout::number_field! { $name, $width, |n| $name(n as $inner), |n: $name| n.0.into(); }
    };
}
pub(crate) use code;
