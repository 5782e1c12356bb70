-- What is spent of budgets in dollars. period is a fulmen.store.v1.BudgetPeriod; period_start is the epoch for all time.
create table budget_spend (
    project_id int not null references project,
    subject text not null,
    period smallint not null,
    period_start timestamptz not null,
    cost_micros bigint not null,
    primary key (project_id, subject, period)
) with (fillfactor = 50);
