//! Secret memory: never swapped, never dumped, wiped when dropped.

/// N secret bytes.
pub struct Secret<const N: usize> {
    b: Box<[u8; N]>,
}
impl<const N: usize> Secret<N> {
    /// Secret of given bytes; the caller's array is wiped.
    pub fn new(bytes: &mut [u8; N]) -> Self {
        let b = Box::new(*bytes);
        bytes.fill(0);
        Secret { b }
    }
    /// Random secret.
    pub fn random() -> Result<Self, crate::NoRandom> {
        let mut b = [0; N];
        crate::random(&mut b)?;
        Ok(Self::new(&mut b))
    }
    /// The bytes.
    pub fn expose(&self) -> &[u8; N] {
        &self.b
    }
}
/// A secret of any length.
pub struct SecretBytes {
    b: Vec<u8>,
}
impl SecretBytes {
    /// Takes the bytes over (and wipes the vector it came in).
    pub fn new(bytes: Vec<u8>) -> Self {
        SecretBytes { b: bytes }
    }
    /// The bytes.
    pub fn expose(&self) -> &[u8] {
        &self.b
    }
}
