//! The shared library and its functions, found by their position in the table. Nothing here comes from the plugin's sources:
//! positions, sizes and codes are those of NCCL's headers.

use core::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

pub(crate) use crosstie_testkit::wait::find as wait_for;

pub(crate) type Ptr = *mut c_void;
pub(crate) const NULL: Ptr = core::ptr::null_mut();
pub(crate) const HANDLE_LEN: usize = 128;
/// What NCCL leaves in the request word of a receive whose completion it does not need.
pub(crate) const OPTIONAL: Ptr = core::ptr::without_provenance_mut(1);
pub(crate) const HOST: c_int = 1;

pub(crate) const SYSTEM_ERROR: c_int = 2;
pub(crate) const INVALID_ARGUMENT: c_int = 4;
pub(crate) const INVALID_USAGE: c_int = 5;
pub(crate) const REMOTE_ERROR: c_int = 6;

static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// NCCL's logger is variadic. With the format `%s`, the one further argument is passed in a register as a sixth parameter is.
unsafe extern "C" fn logger(
    _level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: the plugin passes strings that end with NUL.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"%s");
    let line = text.to_string_lossy().into_owned();
    if std::env::var_os("CROSSTIE_NCCL_TEST_LOG").is_some() {
        eprintln!("[{}] {line}", std::process::id());
    }
    LOG.lock().unwrap_or_else(PoisonError::into_inner).push(line);
}

/// The lines that the plugin has written so far.
pub(crate) fn log() -> Vec<String> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The plugin, opened through one version of the interface.
pub(crate) struct Net {
    table: *const usize,
    pub(crate) version: u32,
    pub(crate) context: Ptr,
    library: Ptr,
    is_initialized: bool,
}

// SAFETY: the table is constant, and the plugin's functions may be called by any thread.
unsafe impl Sync for Net {}

/// Positions in the table.
const INIT: usize = 1;
const DEVICES: usize = 2;
const PROPERTIES: usize = 3;
const LISTEN: usize = 4;
const CONNECT: usize = 5;
const ACCEPT: usize = 6;
const REG_MR: usize = 7;
const REG_MR_DMABUF: usize = 8;
const DEREG_MR: usize = 9;
const ISEND: usize = 10;
const IRECV: usize = 11;
const IFLUSH: usize = 12;
const TEST: usize = 13;
const CLOSE_SEND: usize = 14;
const CLOSE_RECV: usize = 15;
const CLOSE_LISTEN: usize = 16;
const IRECV_CONSUMED: usize = 18;
const MAKE_VDEVICE: usize = 19;
const FINALIZE: usize = 20;
const SET_NET_ATTR: usize = 21;

fn library_path() -> CString {
    let path = std::env::var_os("CROSSTIE_NCCL_LIBRARY").map_or_else(
        || {
            let program = std::env::current_exe().unwrap();
            program.parent().unwrap().join("libcrosstie_nccl.so")
        },
        Into::into,
    );
    CString::new(path.as_os_str().as_encoded_bytes()).unwrap()
}

/// Calls the function at `$at` of the table.
macro_rules! call {
    ($net:expr, $at:expr, ($($kind:ty),*), $($argument:expr),*) => {{
        // SAFETY: the function at this position has these parameters in NCCL's header.
        let function: unsafe extern "C" fn($($kind),*) -> c_int = unsafe {
            let word = $net.table.add($at).read();
            assert_ne!(word, 0, "function {} is NULL", $at);
            core::mem::transmute(word)
        };
        // SAFETY: the pointers are valid, or such that the plugin must refuse them.
        unsafe { function($($argument),*) }
    }};
}

impl Net {
    /// Opens the library and looks up the table.
    pub(crate) fn load(version: u32) -> Net {
        let path = library_path();
        // SAFETY: the library is the plugin, whose constructors do nothing.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "cannot load {path:?}");
        let symbol = CString::new(format!("ncclNetPlugin_v{version}")).unwrap();
        // SAFETY: the library is open.
        let table = unsafe { libc::dlsym(library, symbol.as_ptr()) };
        assert!(!table.is_null(), "no symbol {symbol:?}");
        Net { table: table.cast(), version, context: NULL, library, is_initialized: false }
    }

    /// Opens the library and initialises the network.
    pub(crate) fn open(version: u32) -> Net {
        let mut net = Net::load(version);
        assert_eq!(net.init(-1), 0);
        net
    }

    pub(crate) fn words(&self) -> usize {
        if self.version >= 11 { 22 } else { 20 }
    }

    pub(crate) fn word(&self, at: usize) -> usize {
        assert!(at < self.words());
        // SAFETY: inside the table.
        unsafe { self.table.add(at).read() }
    }

    pub(crate) fn name(&self) -> &CStr {
        // SAFETY: the first word is a string.
        unsafe { CStr::from_ptr(core::ptr::with_exposed_provenance(self.word(0))) }
    }

    pub(crate) fn init(&mut self, traffic_class: c_int) -> c_int {
        let rc = if self.version >= 11 {
            let (context, config) = (&raw mut self.context, &raw const traffic_class);
            call!(
                self,
                INIT,
                (*mut Ptr, u64, *const c_int, usize, Ptr),
                context,
                7,
                config,
                logger as *const () as usize,
                NULL
            )
        } else {
            call!(self, INIT, (usize, Ptr), logger as *const () as usize, NULL)
        };
        self.is_initialized |= rc == 0;
        rc
    }

    pub(crate) fn devices(&self) -> c_int {
        let mut count = -1;
        assert_eq!(call!(self, DEVICES, (*mut c_int), &raw mut count), 0);
        count
    }

    pub(crate) fn devices_raw(&self, count: *mut c_int) -> c_int {
        call!(self, DEVICES, (*mut c_int), count)
    }

    pub(crate) fn properties(&self, device: c_int, to: *mut u8) -> c_int {
        call!(self, PROPERTIES, (c_int, *mut u8), device, to)
    }

    /// `maxP2pBytes` of the first device.
    pub(crate) fn max_bytes(&self) -> usize {
        let mut properties = [0u64; 32];
        assert_eq!(self.properties(0, properties.as_mut_ptr().cast()), 0);
        let at = if self.version >= 12 { 104 } else { 88 };
        properties[at / 8] as usize
    }

    pub(crate) fn listen(&self, device: c_int, handle: *mut u8, comm: *mut Ptr) -> c_int {
        if self.version >= 11 {
            call!(self, LISTEN, (Ptr, c_int, *mut u8, *mut Ptr), self.context, device, handle, comm)
        } else {
            call!(self, LISTEN, (c_int, *mut u8, *mut Ptr), device, handle, comm)
        }
    }

    pub(crate) fn connect(&self, device: c_int, handle: *mut u8, comm: *mut Ptr) -> c_int {
        let mut offload = OPTIONAL;
        let rc = if self.version >= 11 {
            call!(
                self,
                CONNECT,
                (Ptr, c_int, *mut u8, *mut Ptr, *mut Ptr),
                self.context,
                device,
                handle,
                comm,
                &raw mut offload
            )
        } else {
            let config: c_int = -1;
            let config = &raw const config;
            call!(
                self,
                CONNECT,
                (c_int, *const c_int, *mut u8, *mut Ptr, *mut Ptr),
                device,
                config,
                handle,
                comm,
                &raw mut offload
            )
        };
        assert!(rc != 0 || offload.is_null());
        rc
    }

    /// `connect` of version 10 with a traffic class.
    pub(crate) fn connect_v10(&self, class: *const c_int, handle: *mut u8, comm: *mut Ptr) -> c_int {
        assert_eq!(self.version, 10);
        let kind_of_null = core::ptr::null_mut();
        call!(
            self,
            CONNECT,
            (c_int, *const c_int, *mut u8, *mut Ptr, *mut Ptr),
            0,
            class,
            handle,
            comm,
            kind_of_null
        )
    }

    pub(crate) fn accept(&self, listen: Ptr, comm: *mut Ptr) -> c_int {
        let mut offload = OPTIONAL;
        call!(self, ACCEPT, (Ptr, *mut Ptr, *mut Ptr), listen, comm, &raw mut offload)
    }

    pub(crate) fn reg_mr(&self, comm: Ptr, data: *mut u8, len: usize, kind: c_int, to: *mut Ptr) -> c_int {
        call!(self, REG_MR, (Ptr, *mut u8, usize, c_int, *mut Ptr), comm, data, len, kind, to)
    }

    pub(crate) fn reg_mr_dma_buf(
        &self,
        comm: Ptr,
        data: *mut u8,
        len: usize,
        fd: c_int,
        to: *mut Ptr,
    ) -> c_int {
        let kinds = 2;
        call!(
            self,
            REG_MR_DMABUF,
            (Ptr, *mut u8, usize, c_int, u64, c_int, *mut Ptr),
            comm,
            data,
            len,
            kinds,
            0,
            fd,
            to
        )
    }

    pub(crate) fn dereg_mr(&self, comm: Ptr, memory: Ptr) -> c_int {
        call!(self, DEREG_MR, (Ptr, Ptr), comm, memory)
    }

    pub(crate) fn isend(
        &self,
        comm: Ptr,
        data: *mut u8,
        len: usize,
        tag: c_int,
        memory: Ptr,
        to: *mut Ptr,
    ) -> c_int {
        call!(
            self,
            ISEND,
            (Ptr, *mut u8, usize, c_int, Ptr, Ptr, *mut Ptr),
            comm,
            data,
            len,
            tag,
            memory,
            NULL,
            to
        )
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn irecv(
        &self,
        comm: Ptr,
        count: c_int,
        data: *mut *mut u8,
        sizes: *mut usize,
        tags: *mut c_int,
        memory: *mut Ptr,
        to: *mut Ptr,
    ) -> c_int {
        call!(
            self,
            IRECV,
            (Ptr, c_int, *mut *mut u8, *mut usize, *mut c_int, *mut Ptr, *mut Ptr, *mut Ptr),
            comm,
            count,
            data,
            sizes,
            tags,
            memory,
            core::ptr::null_mut(),
            to
        )
    }

    pub(crate) fn iflush(&self, comm: Ptr, data: *mut u8, size: c_int, memory: Ptr, to: *mut Ptr) -> c_int {
        let (mut data, mut size, mut memory) = (data, size, memory);
        call!(
            self,
            IFLUSH,
            (Ptr, c_int, *mut *mut u8, *mut c_int, *mut Ptr, *mut Ptr),
            comm,
            1,
            &raw mut data,
            &raw mut size,
            &raw mut memory,
            to
        )
    }

    pub(crate) fn test(&self, request: Ptr, done: *mut c_int, sizes: *mut c_int) -> c_int {
        call!(self, TEST, (Ptr, *mut c_int, *mut c_int), request, done, sizes)
    }

    /// NCCL calls this after each receive.
    pub(crate) fn irecv_consumed(&self, comm: Ptr, count: usize, request: Ptr) -> c_int {
        call!(self, IRECV_CONSUMED, (Ptr, c_int, Ptr), comm, count as c_int, request)
    }

    pub(crate) fn close_send(&self, comm: Ptr) -> c_int {
        call!(self, CLOSE_SEND, (Ptr), comm)
    }

    pub(crate) fn close_recv(&self, comm: Ptr) -> c_int {
        call!(self, CLOSE_RECV, (Ptr), comm)
    }

    pub(crate) fn close_listen(&self, comm: Ptr) -> c_int {
        call!(self, CLOSE_LISTEN, (Ptr), comm)
    }

    pub(crate) fn make_virtual_device(&self, members: &[c_int]) -> (c_int, c_int) {
        let mut device = -1;
        let mut wanted = [0; 9];
        wanted[0] = members.len() as c_int;
        wanted[1..=members.len()].copy_from_slice(members);
        let rc = call!(self, MAKE_VDEVICE, (*mut c_int, *const c_int), &raw mut device, wanted.as_ptr());
        (rc, device)
    }

    pub(crate) fn set_net_attr(&self) -> c_int {
        let attributes = [-1i32; 11];
        call!(self, SET_NET_ATTR, (Ptr, *const i32), self.context, attributes.as_ptr())
    }
}

/// Ends the communicator and closes the library, as NCCL does after its last communicator. Both must succeed.
impl Drop for Net {
    fn drop(&mut self) {
        if self.is_initialized && self.version >= 11 {
            assert_ok(call!(self, FINALIZE, (Ptr), self.context), "finalize");
        }
        // SAFETY: opened in `load`.
        assert_ok(unsafe { libc::dlclose(self.library) }, "dlclose");
    }
}

/// For calls that a drop makes: they must succeed, unless the test has failed already.
pub(crate) fn assert_ok(rc: c_int, call: &str) {
    assert!(rc == 0 || std::thread::panicking(), "{call}: {rc}");
}
