//! The facts of Envoy's descriptors, which the server makes and imported policies match.

/// The name of the fact that has the domain.
pub const DOMAIN: &str = "domain";
/// The name of the fact that has the keys of all entries, by which a rule is about descriptors with exactly these.
pub const ENTRY_KEYS: &str = "entry_keys";

/// Joins the keys of a descriptor's entries, as the fact `entry_keys` has them.
pub fn join_keys<'k>(keys: impl IntoIterator<Item = &'k str>) -> String {
    keys.into_iter().collect::<Vec<_>>().join(", ")
}
