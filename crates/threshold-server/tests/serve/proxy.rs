//! A proxy in a process of its own, configured by the files in `deploy/`: only ports and places are replaced.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::process::Scratch;

/// Which proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Nginx,
    Caddy,
}

/// A proxy that goes when its test does.
pub(crate) struct Proxy {
    child: Child,
    pub(crate) address: SocketAddr,
    folder: Scratch,
    threshold: String,
    origin: String,
}

impl Proxy {
    /// Starts one that asks `threshold` and passes on to `origin`.
    pub(crate) fn start(kind: Kind, threshold: &str, origin: &str) -> Self {
        // Between finding a free port and taking it another process may be faster: then there is another.
        let start = || Self::try_start(kind, threshold, origin, &|_, text| text);
        (0..5).find_map(|_| start()).expect("a proxy finds a port")
    }

    /// Starts an nginx whose files, each with its name, were edited.
    pub(crate) fn edited(threshold: &str, origin: &str, edit: &dyn Fn(&str, String) -> String) -> Self {
        let start = || Self::try_start(Kind::Nginx, threshold, origin, edit);
        (0..5).find_map(|_| start()).expect("a proxy finds a port")
    }

    /// The same nginx with some lines of threshold.conf no longer commented out.
    pub(crate) fn uncommented(&self, lines: &[&str]) -> Self {
        let open = |line: &str| match line.trim_start().strip_prefix('#') {
            Some(code) if lines.iter().any(|wanted| code.starts_with(wanted)) => code.to_owned(),
            _ => line.to_owned(),
        };
        Self::edited(&self.threshold, &self.origin, &|file, text| match file {
            "threshold.conf" => text.lines().map(open).collect::<Vec<_>>().join("\n"),
            _ => text,
        })
    }

    fn try_start(kind: Kind, threshold: &str, origin: &str, edit: &dyn Fn(&str, String) -> String) -> Option<Self> {
        let folder = Scratch::folder();
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let mut command = match kind {
            Kind::Nginx => nginx(folder.path(), threshold, origin, port, edit),
            Kind::Caddy => caddy(folder.path(), threshold, origin, port),
        };
        let errors = std::fs::File::create(folder.path().join("errors")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let name = command.get_program().to_owned();
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{error}: {} is missing; ./test installs it", name.display()));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        while TcpStream::connect(address).is_err() {
            if let Some(status) = child.try_wait().unwrap() {
                let errors = std::fs::read_to_string(folder.path().join("errors")).unwrap();
                assert!(errors.contains("in use"), "{kind:?} ended with {status}: {errors}");
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(Self { child, address, folder, threshold: threshold.to_owned(), origin: origin.to_owned() })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.folder.path().join("errors")).unwrap_or_default());
        }
    }
}

/// A file of `deploy/` with replacements, each of which must be there once.
fn deployed(file: &str, replaced: &[(&str, &str)]) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    let mut text = std::fs::read_to_string(path).unwrap();
    for (old, new) in replaced {
        assert_eq!(text.matches(old).count(), 1, "{file}: {old}");
        text = text.replace(old, new);
    }
    text
}

fn nginx(folder: &Path, threshold: &str, origin: &str, port: u16, edit: &dyn Fn(&str, String) -> String) -> Command {
    // Debian's nginx keeps these where only root may write.
    let places: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("    {name}_temp_path {}/{name};\n", folder.display()))
        .collect();
    let listen = format!("listen 127.0.0.1:{port};");
    let main = deployed(
        "nginx/nginx.conf",
        &[
            ("http {\n", &format!("http {{\n    access_log off;\n{places}")),
            ("127.0.0.1:8080", threshold),
            ("127.0.0.1:3000", origin),
            ("listen 80;", &listen),
        ],
    );
    let own = deployed("nginx/threshold.conf", &[]);
    for (file, text) in [("nginx.conf", main), ("threshold.conf", own)] {
        std::fs::write(folder.join(file), edit(file, text)).unwrap();
    }
    let mut command = Command::new("nginx");
    let pid = folder.join("pid");
    // One process: with a master, its workers would outlive it.
    command.arg("-p").arg(folder).arg("-c").arg(folder.join("nginx.conf")).args(["-e", "stderr"]);
    command.arg("-g").arg(format!("daemon off; master_process off; pid {};", pid.display()));
    command
}

fn caddy(folder: &Path, threshold: &str, origin: &str, port: u16) -> Command {
    let site = format!(":{port} {{\n\tbind 127.0.0.1\n");
    let replaced = [(":80 {\n", site.as_str()), ("127.0.0.1:8080", threshold), ("127.0.0.1:3000", origin)];
    let text = deployed("caddy/Caddyfile", &replaced);
    let file = folder.join("Caddyfile");
    std::fs::write(&file, format!("{{\n\tadmin off\n\tauto_https off\n}}\n{text}")).unwrap();
    let mut command = Command::new("caddy");
    command.args(["run", "--adapter", "caddyfile", "--config"]).arg(&file);
    command.env("HOME", folder).env("XDG_CONFIG_HOME", folder).env("XDG_DATA_HOME", folder);
    command
}
