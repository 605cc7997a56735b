// A code interpreter of your own for Foundry agents: belljar in a session pool of Azure Container Apps.
//
// Makes a Container Apps environment, a session pool whose containers are belljar's image, a Foundry account with a
// project and a model, and the project's connection to the pool. README.md says what was tried and what was not.

targetScope = 'resourceGroup'

@description('Region of everything; it has to have dynamic sessions and the model.')
param location string = resourceGroup().location

@description('Lower-case letters and digits that the names begin with.')
@minLength(3)
@maxLength(12)
param name string = 'belljar'

@description('belljar\'s image, built with --build-arg SURFACE=foundry and pushed to a registry.')
param image string

@description('Server of a private registry, such as example.azurecr.io; empty for a public one.')
param registryServer string = ''

@description('User-assigned identity that may pull from that registry: its resource id.')
param registryIdentity string = ''

@description('Processors of one session.')
@minValue(1)
@maxValue(16)
param cpu int = 2

@description('Memory of one session.')
param memory string = '4Gi'

@description('Sessions kept ready; each costs while it waits. With 0 the first call of a session waits for a container.')
@minValue(0)
param readySessions int = 1

@description('The most sessions at once.')
@minValue(1)
param maxSessions int = 10

@description('Seconds without a call after which a session ends.')
@minValue(300)
@maxValue(3600)
param cooldown int = 900

@description('Whether the code of sessions may reach the network.')
@allowed(['EgressDisabled', 'EgressEnabled'])
param egress string = 'EgressDisabled'

@description('Model that the agent runs on.')
param modelName string = 'gpt-4o'

@description('Version of the model.')
param modelVersion string = '2024-11-20'

@description('Thousands of tokens a minute.')
@minValue(1)
param modelCapacity int = 30

@description('Whoever may use the pool from a terminal beside the project: the object id of a user; empty for nobody.')
param userPrincipalId string = ''

var suffix = uniqueString(resourceGroup().id, name)
// Azure ContainerApps Session Executor
var sessionExecutor = subscriptionResourceId(
  'Microsoft.Authorization/roleDefinitions',
  '0fb8eba5-a2bb-4abe-b1c1-49dfad359bb0'
)

resource environment 'Microsoft.App/managedEnvironments@2025-01-01' = {
  name: '${name}-environment'
  location: location
  properties: {
    workloadProfiles: [
      {
        name: 'Consumption'
        workloadProfileType: 'Consumption'
      }
    ]
  }
}

resource pool 'Microsoft.App/sessionPools@2025-01-01' = {
  name: '${name}${suffix}'
  location: location
  identity: empty(registryIdentity)
    ? { type: 'None' }
    : {
        type: 'UserAssigned'
        userAssignedIdentities: {
          '${registryIdentity}': {}
        }
      }
  properties: {
    environmentId: environment.id
    poolManagementType: 'Dynamic'
    containerType: 'CustomContainer'
    scaleConfiguration: {
      maxConcurrentSessions: maxSessions
      readySessionInstances: readySessions
    }
    dynamicPoolConfiguration: {
      lifecycleConfiguration: {
        lifecycleType: 'Timed'
        cooldownPeriodInSeconds: cooldown
      }
    }
    sessionNetworkConfiguration: {
      status: egress
    }
    customContainerTemplate: {
      registryCredentials: empty(registryServer)
        ? null
        : {
            server: registryServer
            identity: registryIdentity
          }
      containers: [
        {
          name: 'belljar'
          image: image
          resources: {
            cpu: cpu
            memory: memory
          }
          env: [
            // One container is one session, behind a virtual machine of the platform's, and the platform checks
            // whoever calls. So the container is the wall around the session. This is right here and nowhere else:
            // elsewhere one container serves several sessions, and these three would leave them open to each other.
            {
              name: 'BELLJAR_SANDBOX'
              value: 'process'
            }
            {
              name: 'BELLJAR_MAX_SESSIONS'
              value: '1'
            }
            {
              name: 'BELLJAR_TRUST_NETWORK'
              value: 'true'
            }
            {
              name: 'BELLJAR_HTTP'
              value: '0.0.0.0:8000'
            }
          ]
        }
      ]
      ingress: {
        targetPort: 8000
      }
    }
  }
}

resource account 'Microsoft.CognitiveServices/accounts@2025-06-01' = {
  name: '${name}-${suffix}'
  location: location
  kind: 'AIServices'
  identity: {
    type: 'SystemAssigned'
  }
  sku: {
    name: 'S0'
  }
  properties: {
    allowProjectManagement: true
    customSubDomainName: '${name}-${suffix}'
    disableLocalAuth: true
    publicNetworkAccess: 'Enabled'
  }
}

resource project 'Microsoft.CognitiveServices/accounts/projects@2025-06-01' = {
  parent: account
  name: '${name}-project'
  location: location
  identity: {
    type: 'SystemAssigned'
  }
  properties: {
    displayName: 'Code interpreter of our own'
  }
}

resource model 'Microsoft.CognitiveServices/accounts/deployments@2025-06-01' = {
  parent: account
  name: modelName
  sku: {
    name: 'GlobalStandard'
    capacity: modelCapacity
  }
  properties: {
    model: {
      format: 'OpenAI'
      name: modelName
      version: modelVersion
    }
  }
  dependsOn: [
    project
  ]
}

// Everything after the pool's address is passed on to the container, so belljar's MCP endpoint is reached through it. The
// platform's own `mcpServerSettings` are not used: it drops them for custom containers.
var mcpUrl = '${pool.properties.poolManagementEndpoint}/mcp?identifier=${name}-agent'

// The published types do not have this kind of connection yet, hence any().
resource connection 'Microsoft.CognitiveServices/accounts/projects/connections@2025-10-01-preview' = {
  parent: project
  name: '${name}-interpreter'
  properties: any({
    category: 'RemoteTool'
    authType: 'ProjectManagedIdentity'
    audience: 'https://dynamicsessions.io'
    target: mcpUrl
    isSharedToAll: true
    metadata: {
      ApiType: 'Azure'
    }
  })
}

resource projectMayExecute 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  scope: pool
  name: guid(pool.id, project.id, sessionExecutor)
  properties: {
    roleDefinitionId: sessionExecutor
    principalId: project.identity.principalId
    principalType: 'ServicePrincipal'
  }
}

resource userMayExecute 'Microsoft.Authorization/roleAssignments@2022-04-01' = if (!empty(userPrincipalId)) {
  scope: pool
  name: guid(pool.id, userPrincipalId, sessionExecutor)
  properties: {
    roleDefinitionId: sessionExecutor
    principalId: userPrincipalId
    principalType: 'User'
  }
}

output FOUNDRY_PROJECT_ENDPOINT string = project.properties.endpoints['AI Foundry API']
output FOUNDRY_MODEL_DEPLOYMENT_NAME string = model.name
output MCP_SERVER_URL string = mcpUrl
output MCP_PROJECT_CONNECTION_ID string = connection.id
output POOL_MANAGEMENT_ENDPOINT string = pool.properties.poolManagementEndpoint
