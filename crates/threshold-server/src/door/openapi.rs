//! `/openapi.json`: the OpenAPI document, built from the list of routes and from the types that read and write JSON.

use std::sync::OnceLock;

use bytes::Bytes;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};
use threshold_wire::ErrorBody;

use super::routes;

/// The refusal by [`Hosts`](super::Hosts), which comes before any route.
pub(super) const WRONG_HOST: (u16, &str) = (403, "Host or Origin is not a name of this server");
/// The refusal of a head with a query that is longer than a head may be.
pub(super) const LONG_QUERY: (u16, &str) = (431, "The query and the header fields are too long");
/// The refusal of a call for which there is no memory.
pub(super) const BUSY: (u16, &str) =
    (503, "Too many large bodies are being read, or too many large answers wait to be read (`busy`)");
/// The errors of a call that reads a body.
const CALL_ERRORS: [(u16, &str); 8] = [
    (400, "The request is invalid; the message says why, and in which field"),
    (401, "The token is missing or wrong"),
    WRONG_HOST,
    (408, "The body arrived too slowly"),
    (413, "The body is too large"),
    (415, "The body is compressed, or a web page sent it without Content-Type: application/json"),
    (429, "Too many wrong tokens"),
    BUSY,
];

/// Returns the document, which is built once.
pub(super) fn document() -> Bytes {
    // It depends on the program only, and takes longer to build than a decision to make.
    static DOCUMENT: OnceLock<Bytes> = OnceLock::new();
    DOCUMENT.get_or_init(|| Bytes::from(build().to_string())).clone()
}

fn build() -> Value {
    let mut schemas = Schemas::new();
    let mut paths = Map::new();
    for route in routes::all() {
        let operation = (route.describe)(&mut schemas).into_value(&mut schemas);
        // Several methods of one path are one item in OpenAPI.
        let item = paths.entry(route.path).or_insert_with(|| json!({}));
        if let Some(item) = item.as_object_mut() {
            item.insert(route.method.to_owned(), operation);
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Threshold",
            "description": "Decides, for every request, whether its caller may cross.",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.into_definitions(),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "operator": {"type": "http", "scheme": "bearer"},
            },
        },
        // An empty requirement beside the token: whether a token is needed depends on how the server was started.
        "security": [{}, {"token": []}],
    })
}

/// The JSON Schemas that operations refer to.
pub(super) struct Schemas(SchemaGenerator);

impl Schemas {
    fn new() -> Self {
        // OpenAPI 3.1 uses JSON Schema 2020-12 itself, so that no schema has to be converted.
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
        });
        Self(settings.into_generator())
    }

    /// Returns the schema of a type, or a reference to it.
    pub(super) fn of<T: JsonSchema>(&mut self) -> Value {
        self.0.subschema_for::<T>().to_value()
    }

    fn into_definitions(mut self) -> Map<String, Value> {
        let mut definitions = self.0.take_definitions(true);
        split_reservation(&mut definitions);
        definitions
    }
}

/// Moves `ttlSec` and `onExpire` to a schema of their own: one type reads every request, but only a reservation may have them.
fn split_reservation(definitions: &mut Map<String, Value>) {
    let Some(request) = definitions.get_mut("Request") else { return };
    let reserve = request.clone();
    if let Some(fields) = request.get_mut("properties").and_then(Value::as_object_mut) {
        fields.remove("ttlSec");
        fields.remove("onExpire");
    }
    definitions.insert("Reserve".to_owned(), reserve);
}

/// One operation of the document.
pub(super) struct Operation {
    id: &'static str,
    summary: &'static str,
    parameters: Vec<Value>,
    body: Option<Value>,
    /// The other forms of the body, by media type.
    other_bodies: Map<String, Value>,
    /// The answers by status: their description and content.
    responses: Map<String, Value>,
    errors: Vec<(u16, &'static str)>,
    security: Option<Value>,
}

impl Operation {
    /// An operation with no answers yet.
    pub(super) fn new(id: &'static str, summary: &'static str) -> Self {
        Self {
            id,
            summary,
            parameters: Vec::new(),
            body: None,
            other_bodies: Map::new(),
            responses: Map::new(),
            errors: Vec::new(),
            security: None,
        }
    }

    /// A call of the API that answers with this schema, and with the errors that every call may have.
    pub(super) fn call(id: &'static str, summary: &'static str, answer: &Value) -> Self {
        Self::new(id, summary).response(200, "The answer", &json_content(answer)).errors(&CALL_ERRORS)
    }

    /// The body of the request, in JSON.
    pub(super) fn body(mut self, schema: Value) -> Self {
        self.body = Some(schema);
        self
    }

    /// Another form of the body.
    pub(super) fn body_as(mut self, media_type: &str, schema: &Value) -> Self {
        self.other_bodies.insert(media_type.to_owned(), json!({"schema": schema}));
        self
    }

    pub(super) fn parameter(mut self, parameter: Value) -> Self {
        self.parameters.push(parameter);
        self
    }

    /// An answer. It replaces an error of the same status.
    pub(super) fn response(mut self, status: u16, description: &str, content: &Value) -> Self {
        self.errors.retain(|(other, _)| *other != status);
        self.responses.insert(status.to_string(), json!({"description": description, "content": content}));
        self
    }

    /// Answers whose body is an [`ErrorBody`]. A description replaces an earlier one of the same status.
    pub(super) fn errors(mut self, errors: &[(u16, &'static str)]) -> Self {
        self.errors.retain(|(status, _)| errors.iter().all(|(other, _)| other != status));
        self.errors.extend(errors);
        self
    }

    /// Who may call: a list of OpenAPI's security requirements, of which one must be met.
    pub(super) fn security(mut self, requirements: Value) -> Self {
        self.security = Some(requirements);
        self
    }

    fn into_value(self, schemas: &mut Schemas) -> Value {
        let Self { id, summary, parameters, body, mut other_bodies, mut responses, errors, security } = self;
        let error = json_content(&schemas.of::<ErrorBody>());
        for (status, description) in errors {
            responses.insert(status.to_string(), json!({"description": description, "content": error}));
        }
        let mut operation = json!({"operationId": id, "summary": summary, "responses": responses});
        let optional = [
            ("parameters", (!parameters.is_empty()).then(|| Value::from(parameters))),
            (
                "requestBody",
                body.map(|schema| {
                    other_bodies.insert("application/json".to_owned(), json!({"schema": schema}));
                    json!({"required": true, "content": other_bodies})
                }),
            ),
            ("security", security),
        ];
        if let Some(operation) = operation.as_object_mut() {
            operation.extend(optional.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
        }
        operation
    }
}

/// The `content` of a JSON body with this schema.
pub(super) fn json_content(schema: &Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

/// A required parameter in the path.
pub(super) fn path_parameter(name: &str) -> Value {
    json!({"name": name, "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}})
}
