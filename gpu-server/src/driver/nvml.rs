//! NVML queries, answered without a context on any device.
//!
//! [`Management`] answers them for a session. It needs nothing else from a backend, so a worker that serves
//! only NVML can use it alone: it takes no device memory and starts in milliseconds. Behind it is NVIDIA's
//! library ([`super::cuda::nvml`]) or the software devices' implementation ([`super::software::nvml`]).
//!
//! Processes are the exception: the library knows the workers of all clients. Only the daemon knows whose
//! they are, so the daemon is asked for the client's programs instead.

pub mod answers;

use std::cell::OnceCell;

use protocol::Status;
use protocol::ops::Answer;
use protocol::ops::nvml::{
    NvmlOps, NvmlPair, NvmlPairReply, NvmlProcess, NvmlProcesses, NvmlProcessesReply, NvmlQuery,
    NvmlQueryReply, NvmlSystem, NvmlSystemReply, NvmlText, Query, status,
};
use protocol::wire::Bytes;

use self::answers::Answers;
use super::call::Call;
use super::cuda::{self, nvml::Nvidia};
use super::quota::Quota;
use super::software::nvml::Devices;
use crate::config::{Backend, Backing};

/// Finds the devices. The error is an NVML status.
type Find = Box<dyn Fn() -> Result<Box<dyn Answers>, u32> + Send>;

/// Answers NVML queries. Libraries are loaded, and devices looked for, at the first query.
pub struct Management {
    find: Find,
    answers: OnceCell<Result<Box<dyn Answers>, u32>>,
    quota: Quota,
}

impl Management {
    /// For the devices that `backing` selects. Memory figures and processes are those that `quota` lets the
    /// session see.
    pub fn new(backing: &Backing, quota: Quota) -> Management {
        let (backing, limited) = (backing.clone(), quota.clone());
        let find = move || -> Result<Box<dyn Answers>, u32> {
            let nvidia = || Nvidia::new(&backing, limited.clone());
            let software = || Ok(Box::new(Devices::new(&backing, limited.clone())?) as Box<dyn Answers>);
            match backing.backend {
                Backend::Cuda => Ok(Box::new(nvidia()?)),
                Backend::Software => software(),
                Backend::Auto => match nvidia() {
                    Ok(nvidia) if !nvidia.devices().is_empty() => Ok(Box::new(nvidia)),
                    // CUDA may exist without NVML; the session's devices are then CUDA's.
                    Err(failure) if cuda::probe().is_ok_and(|count| count > 0) => Err(failure),
                    _ => software(),
                },
            }
        };
        Management { find: Box::new(find), answers: OnceCell::new(), quota }
    }

    /// Names of the devices, by ordinal. The error is an NVML status.
    pub fn devices(&self) -> Result<Vec<String>, u32> {
        self.answers().map(|answers| answers.devices())
    }

    fn answers(&self) -> Result<&dyn Answers, u32> {
        self.answers.get_or_init(|| (self.find)()).as_deref().map_err(|status| *status)
    }

    fn system(&self) -> NvmlSystemReply {
        let text = |version: Result<String, u32>| match version {
            Ok(text) => NvmlText { status: status::SUCCESS, text },
            Err(status) => NvmlText { status, text: String::new() },
        };
        match self.answers() {
            Ok(answers) => {
                let [driver_version, nvml_version] = answers.versions().map(text);
                NvmlSystemReply {
                    status: status::SUCCESS,
                    device_count: answers.devices().len() as u32,
                    driver_version,
                    nvml_version,
                    cuda_version: answers.cuda_version(),
                }
            }
            Err(status) => NvmlSystemReply {
                status,
                device_count: 0,
                driver_version: text(Err(status)),
                nvml_version: text(Err(status)),
                cuda_version: 0,
            },
        }
    }

    fn query(&self, op: &NvmlQuery<'_>) -> Result<Vec<u8>, u32> {
        let query = Query::by_number(op.query).ok_or(status::FUNCTION_NOT_FOUND)?;
        self.answers()?.query(query, op)
    }
}

impl NvmlOps<Call> for Management {
    fn nvml_system(&mut self, _cx: &mut Call, _op: NvmlSystem) -> Result<Answer<NvmlSystemReply>, Status> {
        Ok(Answer::Now(self.system()))
    }

    fn nvml_query(&mut self, _cx: &mut Call, op: NvmlQuery<'_>) -> Result<Answer<NvmlQueryReply>, Status> {
        Ok(Answer::Now(match self.query(&op) {
            Ok(output) => NvmlQueryReply { status: status::SUCCESS, output: Bytes(output) },
            Err(status) => NvmlQueryReply { status, output: Bytes::default() },
        }))
    }

    fn nvml_pair(&mut self, _cx: &mut Call, op: NvmlPair) -> Result<Answer<NvmlPairReply>, Status> {
        Ok(Answer::Now(match self.answers().and_then(|answers| answers.pair(&op)) {
            Ok(value) => NvmlPairReply { status: status::SUCCESS, value },
            Err(status) => NvmlPairReply { status, value: 0 },
        }))
    }

    fn nvml_processes(
        &mut self,
        _cx: &mut Call,
        op: NvmlProcesses,
    ) -> Result<Answer<NvmlProcessesReply>, Status> {
        let found = self.answers().and_then(|answers| answers.number(op.device)).and_then(|number| {
            let found = self.quota.processes(number, op.namespace);
            found.map_err(|_| status::UNKNOWN)
        });
        Ok(Answer::Now(match found {
            Ok(found) => NvmlProcessesReply {
                status: status::SUCCESS,
                processes: found.into_iter().map(|(pid, memory)| NvmlProcess { pid, memory }).collect(),
            },
            Err(status) => NvmlProcessesReply { status, processes: Vec::new() },
        }))
    }
}
