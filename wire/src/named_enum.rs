//! Enums whose values have names.

/// Declares a `Copy` enum whose values have a name in messages, traces or scenarios, and derives `ALL`, `name`,
/// `from_name` and `Display` from the declaration.
#[macro_export]
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $type:ident {
            $( $(#[$variant_meta:meta])* $variant:ident $(= $number:literal)? => $name:literal, )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $visibility enum $type { $( $(#[$variant_meta])* $variant $(= $number)?, )* }

        #[allow(dead_code, reason = "not every enum needs all of them")]
        impl $type {
            /// Every value, in the order of the declaration.
            pub const ALL: [$type; [$($name),*].len()] = [$($type::$variant),*];

            /// The name.
            pub const fn name(self) -> &'static str {
                match self { $( $type::$variant => $name, )* }
            }

            /// The value with this name.
            pub fn from_name(name: &str) -> Option<$type> {
                $type::ALL.into_iter().find(|value| value.name() == name)
            }
        }

        impl ::core::fmt::Display for $type {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
