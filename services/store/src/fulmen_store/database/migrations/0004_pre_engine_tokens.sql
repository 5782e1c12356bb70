-- Role 6 is that of engines on other machines.
alter table issued_token drop constraint issued_token_role_check;
alter table issued_token add constraint issued_token_role_check check (role between 1 and 6);
