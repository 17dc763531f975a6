//! The identity of a caller, from the authentication of the Worker that guards its handler.

use threshold_limiter::tower::Identified;
use worker::js_sys::{Object, Reflect, TypeError};
use worker::wasm_bindgen::{JsCast as _, JsValue};

/// Reads an identity from JavaScript.
///
/// # Errors
/// Fails with a `TypeError` where it is not an object, or has a field that is unknown or no string. A misspelt name must not let a caller
/// pass as nobody.
pub(crate) fn read(value: &JsValue) -> Result<Identified, TypeError> {
    let mut identity = Identified::default();
    if value.is_undefined() || value.is_null() {
        return Ok(identity);
    }
    let Some(object) = value.dyn_ref::<Object>() else {
        return Err(TypeError::new("guard: the identity is not an object"));
    };
    for name in Object::keys(object).iter() {
        let text = name.as_string().unwrap_or_default();
        let field = match text.as_str() {
            "tenant" => &mut identity.tenant,
            "user" => &mut identity.user,
            "tier" => &mut identity.tier,
            _ => {
                return Err(TypeError::new(&format!(
                    "guard: identity.{text} is unknown; it has tenant, user and tier"
                )));
            }
        };
        let value = Reflect::get(object, &name).unwrap_or_default();
        if value.is_undefined() || value.is_null() {
            continue;
        }
        let Some(given) = value.as_string() else {
            return Err(TypeError::new(&format!("guard: identity.{text} is not a string")));
        };
        *field = Some(given);
    }
    Ok(identity)
}
