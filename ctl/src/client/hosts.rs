//! Calls about the life of hosts, and about what waits.

use vmferry_proto::v1::{
    CancelEmptyingRequest, CompleteMaintenanceRequest, CordonHostRequest, DeleteHostReply,
    DeleteHostRequest, DrainHostRequest, Emptying, GetEmptyingRequest, Host, ListEmptyingsReply,
    ListEmptyingsRequest, ListQueueReply, ListQueueRequest, MaintenanceRequest,
    UncordonHostRequest,
};

use super::{Client, Unanswered, in_doubt, patient, timed};
use crate::failure::Failure;

fn host_in_doubt(host: &str) -> Unanswered {
    in_doubt(&format!("vmferry host show {host}"))
}

impl Client {
    pub(crate) async fn cordon_host(
        &self,
        operation: &str,
        request: CordonHostRequest,
    ) -> Result<Host, Failure> {
        let doubt = host_in_doubt(&request.host);
        let reply = self.api.clone().cordon_host(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn uncordon_host(
        &self,
        operation: &str,
        request: UncordonHostRequest,
    ) -> Result<Host, Failure> {
        let doubt = host_in_doubt(&request.host);
        let reply = self.api.clone().uncordon_host(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn plan_maintenance(
        &self,
        operation: &str,
        request: MaintenanceRequest,
    ) -> Result<Emptying, Failure> {
        let reply = self.api.clone().plan_maintenance(patient(request)).await;
        self.answer(operation, reply, &Unanswered::Harmless)
    }

    pub(crate) async fn execute_maintenance(
        &self,
        operation: &str,
        request: MaintenanceRequest,
    ) -> Result<Emptying, Failure> {
        let doubt = host_in_doubt(&request.host);
        let reply = self.api.clone().execute_maintenance(patient(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn complete_maintenance(
        &self,
        operation: &str,
        request: CompleteMaintenanceRequest,
    ) -> Result<Emptying, Failure> {
        let doubt = in_doubt(&format!("vmferry host maintenance show {}", request.id));
        let reply = self.api.clone().complete_maintenance(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn drain_host(
        &self,
        operation: &str,
        request: DrainHostRequest,
    ) -> Result<Emptying, Failure> {
        let doubt = host_in_doubt(&request.host);
        let reply = self.api.clone().drain_host(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn retire_host(
        &self,
        operation: &str,
        request: DrainHostRequest,
    ) -> Result<Emptying, Failure> {
        let doubt = host_in_doubt(&request.host);
        let reply = self.api.clone().retire_host(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn delete_host(
        &self,
        operation: &str,
        request: DeleteHostRequest,
    ) -> Result<DeleteHostReply, Failure> {
        let reply = self.api.clone().delete_host(timed(request)).await;
        self.answer(operation, reply, &in_doubt("vmferry host list"))
    }

    pub(crate) async fn list_emptyings(
        &self,
        request: ListEmptyingsRequest,
    ) -> Result<ListEmptyingsReply, Failure> {
        let reply = self.api.clone().list_emptyings(timed(request)).await;
        self.answer("list maintenance jobs and drains", reply, &Unanswered::Harmless)
    }

    pub(crate) async fn emptying(&self, id: &str) -> Result<Emptying, Failure> {
        let request = GetEmptyingRequest { id: id.to_owned() };
        let reply = self.api.clone().get_emptying(timed(request)).await;
        self.answer(&format!("show maintenance job or drain {id}"), reply, &Unanswered::Harmless)
    }

    pub(crate) async fn cancel_emptying(
        &self,
        operation: &str,
        request: CancelEmptyingRequest,
    ) -> Result<Emptying, Failure> {
        let doubt = in_doubt(&format!("vmferry host maintenance show {}", request.id));
        let reply = self.api.clone().cancel_emptying(timed(request)).await;
        self.answer(operation, reply, &doubt)
    }

    pub(crate) async fn queue(&self) -> Result<ListQueueReply, Failure> {
        let reply = self.api.clone().list_queue(timed(ListQueueRequest {})).await;
        self.answer("list what waits", reply, &Unanswered::Harmless)
    }
}
