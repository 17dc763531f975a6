//! The classes of Durable Objects. A deployment names them, and an object of one class cannot be read as another. All do the same.

#![expect(missing_docs, reason = "the macro of the `worker` crate writes methods without documentation")]

use worker::{DurableObject, Env, Request, Response, Result, State, durable_object, wasm_bindgen};

use super::Object;

macro_rules! classes {
    ($($(#[$doc:meta])+ $name:ident;)+) => {
        $(
            $(#[$doc])+
            #[durable_object]
            #[derive(Debug)]
            pub struct $name {
                object: Object,
            }

            impl DurableObject for $name {
                fn new(state: State, _: Env) -> Self {
                    Self { object: Object::new(state) }
                }

                async fn fetch(&self, request: Request) -> Result<Response> {
                    self.object.fetch(request).await
                }

                async fn alarm(&self) -> Result<Response> {
                    self.object.alarm().await
                }
            }
        )+
    };
}

classes! {
    /// The class of rules without a `place`.
    ThresholdObject;
    /// One object for each user of a tenant.
    RateLimiter;
    /// One object for each tenant.
    TenantDO;
    /// One object for each user, or for each account and address of a login.
    SessionDO;
}
