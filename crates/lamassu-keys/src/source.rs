//! Key source URIs.
