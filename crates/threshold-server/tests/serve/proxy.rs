//! Starts a proxy as a process, with the files in `deploy/` or those that `threshold export` writes for a policy. Only ports,
//! paths and the edits of a test are replaced.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::process::Scratch;

/// The kind of proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Nginx,
    Caddy,
}

/// The source of a proxy's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Files<'p> {
    /// The files in `deploy/`.
    Shipped,
    /// The files that are exported from this policy.
    Exported(&'p Path),
}

/// Edits a file, given its name and text.
type Rewrite<'a> = &'a dyn Fn(&str, String) -> String;

/// How a proxy is started.
#[derive(Clone)]
pub(crate) struct Setup<'a> {
    pub(crate) kind: Kind,
    pub(crate) threshold: &'a str,
    pub(crate) origin: &'a str,
    pub(crate) files: Files<'a>,
    /// Replacements in the configuration; each old text must occur once.
    pub(crate) edits: &'a [(&'a str, &'a str)],
    /// Other edits of nginx's files.
    pub(crate) rewrite: Option<Rewrite<'a>>,
}

/// A proxy that ends with its test.
pub(crate) struct Proxy {
    child: Child,
    pub(crate) address: SocketAddr,
    folder: Scratch,
}

impl Proxy {
    /// Starts nginx with edited files.
    pub(crate) fn edited(threshold: &str, origin: &str, rewrite: Rewrite<'_>) -> Self {
        let (kind, files) = (Kind::Nginx, Files::Shipped);
        Setup { kind, threshold, origin, files, edits: &[], rewrite: Some(rewrite) }.start()
    }

    /// Returns its standard error.
    pub(crate) fn errors(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("errors")).unwrap()
    }
}

impl Setup<'_> {
    pub(crate) fn start(&self) -> Proxy {
        // Another process may take the free port first: then another port is tried.
        (0..5).find_map(|_| self.try_start()).expect("a proxy finds a port")
    }

    fn try_start(&self) -> Option<Proxy> {
        let folder = Scratch::folder();
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let mut command = match self.kind {
            Kind::Nginx => self.nginx(folder.path(), port),
            Kind::Caddy => self.caddy(folder.path(), port),
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
                assert!(errors.contains("in use"), "{:?} ended with {status}: {errors}", self.kind);
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(Proxy { child, address, folder })
    }

    fn nginx(&self, folder: &Path, port: u16) -> Command {
        // Debian's defaults for these are writable only by root.
        let places: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|name| format!("    {name}_temp_path {}/{name};\n", folder.display()))
            .collect();
        let mut texts = [
            ("nginx.conf", shipped("nginx/nginx.conf")),
            ("threshold.conf", self.written("nginx/threshold.conf", &["nginx-auth"])),
            ("threshold_location.conf", self.written("nginx/threshold_location.conf", &["nginx-auth", "--location"])),
        ];
        let listen = format!("listen 127.0.0.1:{port};");
        let own = [
            ("http {\n", format!("http {{\n    access_log off;\n{places}")),
            ("server 127.0.0.1:8080", format!("server {}", self.threshold)),
            ("Host 127.0.0.1:8080", format!("Host {}", self.threshold)),
            ("127.0.0.1:3000", self.origin.to_owned()),
            ("listen 80;", listen),
        ];
        let own = own.iter().map(|(old, new)| (*old, new.as_str()));
        replace(&mut texts, own.chain(self.edits.iter().copied()));
        for (name, text) in texts {
            let text = self.rewrite.map_or_else(|| text.clone(), |rewrite| rewrite(name, text.clone()));
            std::fs::write(folder.join(name), text).unwrap();
        }
        let mut command = Command::new("nginx");
        let pid = folder.join("pid");
        // A single process: with a master, the workers could outlive it.
        command.arg("-p").arg(folder).arg("-c").arg(folder.join("nginx.conf")).args(["-e", "stderr"]);
        command.arg("-g").arg(format!("daemon off; master_process off; pid {};", pid.display()));
        command
    }

    fn caddy(&self, folder: &Path, port: u16) -> Command {
        let site = format!(":{port} {{\n\tbind 127.0.0.1\n");
        let own = [(":80 {\n", site.as_str()), ("127.0.0.1:8080", self.threshold), ("127.0.0.1:3000", self.origin)];
        let mut texts = [("Caddyfile", self.written("caddy/Caddyfile", &["caddy-auth"]))];
        replace(&mut texts, own.into_iter().chain(self.edits.iter().copied()));
        let [(_, text)] = texts;
        let file = folder.join("Caddyfile");
        std::fs::write(&file, format!("{{\n\tadmin off\n\tauto_https off\n}}\n{text}")).unwrap();
        let mut command = Command::new("caddy");
        command.args(["run", "--adapter", "caddyfile", "--config"]).arg(&file);
        command.env("HOME", folder).env("XDG_CONFIG_HOME", folder).env("XDG_DATA_HOME", folder);
        command
    }

    /// Returns a configuration from `deploy/`, or an exported one.
    fn written(&self, file: &str, export: &[&str]) -> String {
        match self.files {
            Files::Shipped => shipped(file),
            Files::Exported(policy) => {
                let mut command = Command::new(env!("CARGO_BIN_EXE_threshold"));
                let output = command.arg("export").args(export).arg(policy).output().unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
                String::from_utf8(output.stdout).unwrap()
            }
        }
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

fn shipped(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file)).unwrap()
}

/// Makes replacements; each old text must occur once in one of the files.
fn replace<'e>(texts: &mut [(&str, String)], edits: impl Iterator<Item = (&'e str, &'e str)>) {
    for (old, new) in edits {
        assert_eq!(texts.iter().map(|(_, text)| text.matches(old).count()).sum::<usize>(), 1, "{old}");
        texts.iter_mut().for_each(|(_, text)| *text = text.replace(old, new));
    }
}
