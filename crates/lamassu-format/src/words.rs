//! Words of headers, which the command line uses too. Each value has one word.

/// Gives an enum its words.
macro_rules! words {
    ($(#[$doc:meta])* $type:ident { $($variant:ident = $word:literal),+ $(,)? }) => {
        impl $type {
            $(#[$doc])*
            pub const ALL: [$type; [$($word),+].len()] = [$($type::$variant),+];

            /// Its word in headers and on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant => $word),+
                }
            }

            /// The value of a word, or `None`.
            pub fn from_name(name: &str) -> Option<$type> {
                match name {
                    $($word => Some($type::$variant),)+
                    _ => None,
                }
            }
        }
    };
}
pub(crate) use words;
