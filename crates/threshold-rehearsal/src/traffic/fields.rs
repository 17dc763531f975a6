//! Maps the fields of a log to facts: by the command line, else by the names that common servers use.

use anyhow::{Context as _, bail};

/// A fact that a log may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Field {
    Time,
    Ip,
    Method,
    Path,
    /// The whole request line, `GET /path HTTP/1.1`.
    Request,
    Host,
    User,
    Tenant,
    Tier,
    Status,
    Bytes,
    Account,
    Success,
}

impl Field {
    pub(crate) const COUNT: usize = 13;

    /// Our name of each field, and its names in JSON logs, the most specific first: nginx and Apache as commonly configured,
    /// Caddy, Traefik, Cloudflare, AWS and the Elastic Common Schema.
    const ALL: [(&str, Self, &str); Self::COUNT] = [
        (
            "time",
            Self::Time,
            "time ts timestamp @timestamp time_iso8601 time_local msec StartUTC start_time EdgeStartTimestamp \
             datetime date requestTime",
        ),
        (
            "ip",
            Self::Ip,
            "ip client_ip remote_addr remote_ip clientip clientIp ClientIP ClientHost request.client_ip \
             request.remote_ip client.ip source.ip http.client_ip client sourceIp remoteAddr remoteIp \
             http_request.remoteIp httpRequest.remoteIp c-ip",
        ),
        (
            "method",
            Self::Method,
            "method request_method verb http_method http.method http.request.method request.method RequestMethod \
             ClientRequestMethod httpMethod httpRequest.requestMethod cs-method",
        ),
        (
            "path",
            Self::Path,
            "path uri request_uri url request.uri http.path url.path http.url RequestPath ClientRequestURI \
             requestUrl httpRequest.requestUrl rawPath cs-uri-stem",
        ),
        ("request", Self::Request, "request request_line"),
        (
            "host",
            Self::Host,
            "host http_host server_name vhost request.host http.host url.domain RequestHost ClientRequestHost \
             cs-host",
        ),
        ("user", Self::User, "user user_id userId remote_user username user.id user.name sub"),
        ("tenant", Self::Tenant, "tenant tenant_id tenantId"),
        ("tier", Self::Tier, "tier plan"),
        (
            "status",
            Self::Status,
            "status status_code code response http.response.status_code http.status_code OriginStatus \
             DownstreamStatus EdgeResponseStatus httpRequest.status sc-status",
        ),
        ("bytes", Self::Bytes, "request_length bytes_read http.request.bytes request_bytes httpRequest.requestSize"),
        ("account", Self::Account, "account username user user_id userId email login user.name user.email"),
        ("success", Self::Success, "success result outcome event.outcome status ok"),
    ];

    fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(own, _, _)| *own == name).map(|(_, field, _)| *field)
    }
}

/// The mapping of a log's fields.
#[derive(Debug, Clone)]
pub(crate) struct Fields {
    pub(super) columns: Columns,
    /// Every name, sorted, with its field and its rank among the names of that field.
    names: Vec<(String, Field, u8)>,
}

impl Default for Fields {
    fn default() -> Self {
        Self::new(&[])
    }
}

impl Fields {
    fn new(given: &[(Field, String)]) -> Self {
        let mut names: Vec<(String, Field, u8)> = Vec::new();
        for (_, field, well_known) in Field::ALL {
            match given.iter().find(|(own, _)| *own == field) {
                // A name that the operator gives replaces all known ones: another field with a usual name may mean
                // something else in this log.
                Some((_, name)) => names.push((name.clone(), field, 0)),
                None => {
                    let known = well_known.split_whitespace().zip(0_u8..);
                    names.extend(known.map(|(name, rank)| (name.to_owned(), field, rank)));
                }
            }
        }
        // Sorted for the binary search in `of_key`, which is called for every key of every line.
        names.sort_by(|one, other| one.0.cmp(&other.0));
        Self { columns: Columns::new(given), names }
    }

    /// Builds the mapping from `--field NAME=FIELD`, `--user-field` and `--tenant-field`.
    pub(crate) fn from_args(
        pairs: &[(String, String)],
        user: Option<&str>,
        tenant: Option<&str>,
    ) -> anyhow::Result<Self> {
        let mut given = Vec::new();
        for (name, own) in pairs {
            let known: Vec<&str> = Field::ALL.iter().map(|(name, _, _)| *name).collect();
            let field = Field::named(name)
                .with_context(|| format!("--field: unknown name \"{name}\"; the names are {}", known.join(", ")))?;
            given.push((field, own.clone()));
        }
        given.extend(user.map(|name| (Field::User, name.to_owned())));
        given.extend(tenant.map(|name| (Field::Tenant, name.to_owned())));
        for (index, (field, _)) in given.iter().enumerate() {
            if given.iter().take(index).any(|(other, _)| other == field) {
                bail!("the field {field:?} is given twice");
            }
        }
        Ok(Self::new(&given))
    }

    /// Returns the fields of a JSON key, with their ranks. A key may be two of them: `username` is the user and the account.
    pub(super) fn of_key(&self, key: &str) -> impl Iterator<Item = (Field, u8)> {
        let start = self.names.partition_point(|(name, _, _)| name.as_str() < key);
        let own = self.names.iter().skip(start).take_while(move |(name, _, _)| name == key);
        own.map(|(_, field, rank)| (*field, *rank))
    }

    /// Whether any name continues below this key, as `request.host` does below `request`.
    pub(super) fn goes_below(&self, key: &str) -> bool {
        let start = self.names.partition_point(|(name, _, _)| name.as_str() <= key);
        // `request_uri` begins with `request` too, and is not below it.
        let below = |name: &str| name.strip_prefix(key).is_some_and(|rest| rest.starts_with('.'));
        self.names.iter().skip(start).take_while(|(name, _, _)| name.starts_with(key)).any(|(name, _, _)| below(name))
    }
}

/// The columns of a text log for names. By default the user is the column `user`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Columns {
    pub(super) user: Option<Column>,
    pub(super) tenant: Option<Column>,
    pub(super) tier: Option<Column>,
}

/// A column of a text log that may hold a name.
#[derive(Debug, Clone, Copy)]
pub(super) enum Column {
    Host,
    Ident,
    User,
}

impl Columns {
    fn new(given: &[(Field, String)]) -> Self {
        let column = |field: Field| match given.iter().find(|(own, _)| *own == field)?.1.as_str() {
            "host" => Some(Column::Host),
            "ident" => Some(Column::Ident),
            "user" => Some(Column::User),
            _ => None,
        };
        let is_given = given.iter().any(|(field, _)| *field == Field::User);
        let user = if is_given { column(Field::User) } else { Some(Column::User) };
        Self { user, tenant: column(Field::Tenant), tier: column(Field::Tier) }
    }
}
